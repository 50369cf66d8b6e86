"""Who sends which piece to whom in which step: the algorithms behind the collectives, as lists of rounds.

Positions count within the group (0 to x-1). A chunk is found by its key: ``(chunk,)``, or ``(from, to)`` in an all-to-all. Rounds only say
what moves; ``Network.run`` moves it, adds it up and counts. Sources: rings, Patarasu and Yuan (2009), doi:10.1016/j.jpdc.2008.09.002;
binomial trees and pairwise exchange, Thakur, Rabenseifner and Gropp (2005), doi:10.1177/1094342005051521.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Key = tuple[int, ...]


class Chunk(NamedTuple):
    """Some elements, and the ranks whose contributions they sum (one rank: a plain copy of what that rank had)."""

    array: npt.NDArray[np.generic]
    ranks: tuple[int, ...]

    def plus(self, other: Chunk, largest: bool = False) -> Chunk:
        """The sum of both, or their maximum element by element."""
        return Chunk((np.maximum if largest else np.add)(self.array, other.array), tuple(sorted(self.ranks + other.ranks)))


class Transfer(NamedTuple):
    """One message: the chunks ``keys`` from position ``source`` to ``target``.

    ``add``: the target adds them to its own instead of putting them in place; ``keep``: the source needs them still.
    """

    source: int
    target: int
    keys: tuple[Key, ...]
    add: bool = False
    keep: bool = True


Round = list[Transfer]


def label(transfer: Transfer, chunks: Sequence[Chunk]) -> str:
    """What a message carries, for a reader: ``c0``, ``c0 = r1+r2``, ``piece 0 to 2``."""
    return ", ".join(chunk_label(key, chunk.ranks, transfer.add) for key, chunk in zip(transfer.keys, chunks, strict=True))


def chunk_label(key: Key, ranks: Sequence[int], summed: bool) -> str:
    """``c0``; where it is ``summed``, or the sum of several, with the ranks in the sum: ``c0 = r1+r2``; ``0 to 2`` in an all-to-all."""
    if len(key) == 2:
        return f"{key[0]} to {key[1]}"
    return f"c{key[0]} = {_sum_of(ranks)}" if summed or len(ranks) > 1 else f"c{key[0]}"


def _sum_of(ranks: Sequence[int]) -> str:
    """``r1+r2``; more than four ranks in runs: ``r0..r5+r9``."""
    if len(ranks) <= 4:
        return "+".join(f"r{rank}" for rank in ranks)
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return "+".join(f"r{run[0]}..r{run[-1]}" if len(run) > 1 else f"r{run[0]}" for run in runs)


def schedule(kind: str, algorithm: str, size: int, root: int = 0) -> list[Round]:
    """The rounds of a collective in a group of ``size``; none in a group of one. ``root`` is a position.

    ValueError for a pair of kind and algorithm that is not built.
    """
    chosen: dict[tuple[str, str], Callable[[], list[Round]]] = {
        ("all_gather", "ring"): lambda: _ring_gather(size),
        ("all_gather", "naive"): lambda: [r for owner in range(size) for r in _star_out(size, owner, ((owner,),) * size)],
        ("reduce_scatter", "ring"): lambda: _ring_reduce(size),
        ("all_reduce", "ring"): lambda: _ring_reduce(size) + _ring_gather(size),
        ("all_reduce", "tree"): lambda: _tree_reduce(size, 0) + _tree_broadcast(size, 0),
        ("all_reduce", "star"): lambda: _star_reduce(size, 0) + _star_out(size, 0, ((0,),) * size),
        ("broadcast", "tree"): lambda: _tree_broadcast(size, root),
        ("broadcast", "star"): lambda: _star_out(size, root, ((0,),) * size),
        ("reduce", "tree"): lambda: _tree_reduce(size, root),
        ("reduce", "star"): lambda: _star_reduce(size, root),
        ("scatter", "star"): lambda: _star_out(size, root, [(i,) for i in range(size)], keep=False),
        ("scatter", "tree"): lambda: _tree_scatter(size, root),
        ("gather", "star"): lambda: [[Transfer(i, root, ((i,),), keep=True)] for i in _others(size, root)],
        ("gather", "tree"): lambda: _reversed(_tree_scatter(size, root)),
        ("all_to_all", "pairwise"): lambda: _pairwise(size),
    }
    if (kind, algorithm) not in chosen:
        raise ValueError(f"no algorithm {algorithm} for {kind}")
    return chosen[kind, algorithm]()


def _others(size: int, root: int) -> list[int]:
    """Every position but the root's, from its next one on."""
    return [(root + k) % size for k in range(1, size)]


def _ring_gather(size: int) -> list[Round]:
    """Everybody hands on what it got last: x-1 rounds."""
    return [[Transfer(i, (i + 1) % size, (((i - s) % size,),)) for i in range(size)] for s in range(size - 1)]


def _ring_reduce(size: int) -> list[Round]:
    """Chunk c starts at its owner's next position and gathers a contribution at each, until it arrives at its owner: x-1 rounds."""
    return [[Transfer(i, (i + 1) % size, (((i - 1 - s) % size,),), add=True, keep=False) for i in range(size)] for s in range(size - 1)]


def _star_out(size: int, root: int, keys: Sequence[Key], keep: bool = True) -> list[Round]:
    """The root sends to everybody in turn."""
    return [[Transfer(root, i, (keys[i],), keep=keep)] for i in _others(size, root)]


def _star_reduce(size: int, root: int) -> list[Round]:
    return [[Transfer(i, root, ((0,),), add=True, keep=False)] for i in _others(size, root)]


def _tree_broadcast(size: int, root: int) -> list[Round]:
    """Whoever has it hands it on: twice as many have it after each round."""
    rounds, having = [], 1
    while having < size:
        new = range(having, min(2 * having, size))
        rounds.append([Transfer((root + i - having) % size, (root + i) % size, ((0,),)) for i in new])
        having *= 2
    return rounds


def _tree_reduce(size: int, root: int) -> list[Round]:
    """A broadcast tree backwards, with sums."""
    return [[t._replace(source=t.target, target=t.source, add=True, keep=False) for t in r] for r in reversed(_tree_broadcast(size, root))]


def _tree_scatter(size: int, root: int) -> list[Round]:
    """Whoever has chunks for a range of positions gives away the upper half of them."""
    rounds, span = [], 1
    while span < size:
        span *= 2
    while span > 1:
        half = span // 2
        rounds.append(
            [
                Transfer(
                    (root + low) % size,
                    (root + low + half) % size,
                    tuple(((root + i) % size,) for i in range(low + half, min(low + span, size))),
                    keep=False,
                )
                for low in range(0, size - half, span)
            ]
        )
        span = half
    return rounds


def _reversed(rounds: Sequence[Round]) -> list[Round]:
    return [[t._replace(source=t.target, target=t.source) for t in transfers] for transfers in reversed(rounds)]


def _pairwise(size: int) -> list[Round]:
    """In round s everybody sends to the position s further on."""
    return [[Transfer(i, (i + s) % size, ((i, (i + s) % size),), keep=False) for i in range(size)] for s in range(1, size)]
