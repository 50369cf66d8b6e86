"""Blocks of a pipeline's work that hold several pieces, cut where one piece ends.

No message lies between two pieces where the first sends nothing and the next one's message was asked for earlier, or needs none. Pieces of
one phase on one rank run about as many kernels each, so that a block with k times as many holds k of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekit.graph.blocks import Blocks
from tracekit.job.activity import Work
from tracekit.trace.events import BoolArray, Int8Array, Int64Array

#: So much of a piece may a block differ from a whole number of them.
_UNLIKE = 0.25


@dataclass(frozen=True)
class Cut:
    """Where blocks end up: block ``block[i]`` has a piece of ``kernels[i]`` kernels; in order, every block at least once."""

    block: Int64Array
    kernels: Int64Array

    @staticmethod
    def even(count: Int64Array, size: Int64Array) -> Cut:
        """Each block in ``count`` pieces as alike as whole kernels let them be."""
        block = np.repeat(np.arange(len(count)), count)
        nth = np.arange(len(block)) - np.repeat(np.cumsum(count) - count, count)
        whole, rest = np.divmod(size[block], count[block])
        return Cut(block, whole + (nth < rest))


def sizes(blocks: Blocks, work: Int8Array) -> Int64Array:
    """Kernels that compute in each block; ``work`` of every node."""
    own = (blocks.of_node >= 0) & (work == Work.COMPUTE)
    return np.bincount(blocks.of_node[own], minlength=len(blocks.step)).astype(np.int64)


def alike(size: Int64Array, total: int) -> Int64Array | None:
    """How many of ``total`` pieces of one length each block of ``size`` kernels holds; None where no whole numbers fit."""
    if not len(size) or not total or size.sum() < total:
        return None
    each = size.sum() / total
    count = np.maximum(np.rint(size / each), 1).astype(np.int64)
    fits = count.sum() == total and (np.abs(size - count * each) <= _UNLIKE * each).all()
    return count if fits else None


def cut_at(blocks: Blocks, cut: Cut, start: Int64Array, end: Int64Array, work: Int8Array) -> Blocks:
    """The blocks as the cut has them; ``start``, ``end`` and ``work`` of every node, in the order of calls as the blocks are."""
    if len(cut.block) == len(blocks.step):
        return blocks
    inside = np.flatnonzero(blocks.of_node >= 0)
    inside = inside[np.argsort(blocks.of_node[inside], kind="stable")]
    computes: BoolArray = work[inside] == Work.COMPUTE
    # What is between two kernels belongs to the first of them; what is before a block's first kernel to that one.
    place = np.cumsum(computes) - 1
    first = np.searchsorted(blocks.of_node[inside], np.arange(len(blocks.step)))
    before: Int64Array = np.cumsum(computes)[first] - computes[first]
    place = np.maximum(place, before[blocks.of_node[inside]])
    piece = np.searchsorted(np.cumsum(cut.kernels), place, side="right")
    of_node = np.full_like(blocks.of_node, -1)
    of_node[inside] = piece
    count = len(cut.block)
    begins, ends = np.full(count, np.iinfo(np.int64).max), np.full(count, np.iinfo(np.int64).min)
    np.minimum.at(begins, piece[computes], start[inside[computes]])
    np.maximum.at(ends, piece[computes], end[inside[computes]])
    opens = np.append(True, cut.block[1:] != cut.block[:-1])
    closes = np.append(opens[1:], True)
    return Blocks(
        of_node,
        blocks.step[cut.block],
        blocks.forward[cut.block],
        np.where(opens, blocks.start[cut.block], begins),
        np.where(closes, blocks.end[cut.block], ends),
        np.where(closes, blocks.sends[cut.block], 0),
    )
