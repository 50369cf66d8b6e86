"""Blocks of several pieces are cut by their kernels, and only where whole numbers fit."""

import numpy as np
import pytest

from tracekit.graph.blocks import Blocks
from tracekit.graph.cuts import Cut, alike, cut_at
from tracekit.job.activity import Work


@pytest.mark.parametrize(
    ("size", "total", "count"),
    [
        ([6, 6, 12], 4, [1, 1, 2]),
        ([24], 4, [4]),
        ([6, 7, 13], 4, [1, 1, 2]),  # pieces need not be alike to the kernel
        ([6, 6, 8], 3, [1, 1, 1]),  # a longer piece is no second one
        ([6, 6, 9], 4, None),
        ([2], 4, None),  # fewer kernels than pieces
        ([], 2, None),
    ],
)
def test_a_block_holds_as_many_pieces_as_it_has_kernels_for(size: list[int], total: int, count: list[int] | None) -> None:
    found = alike(np.array(size, np.int64), total)
    assert (None if found is None else found.tolist()) == count


def test_a_cut_gives_each_piece_its_kernels_and_their_times() -> None:
    # Block 0: a collective, four kernels with one in between; block 1: one kernel. A node of no block in front.
    work = np.array([Work.COMPUTE, Work.COMMUNICATION, *[Work.COMPUTE] * 2, Work.COMMUNICATION, *[Work.COMPUTE] * 3], np.int8)
    start = np.array([0, 5, 10, 20, 25, 40, 50, 70])
    blocks = Blocks(
        np.array([-1, 0, 0, 0, 0, 0, 0, 1]),
        np.array([3, 3]),
        np.array([True, False]),
        np.array([12, 70]),  # the first begins behind its message
        np.array([58, 78]),
        np.array([1, 0]),
    )
    cut = cut_at(blocks, Cut(np.array([0, 0, 1]), np.array([2, 2, 1])), start, start + 8, work)
    assert cut.of_node.tolist() == [-1, 0, 0, 0, 0, 1, 1, 2]
    assert (cut.start.tolist(), cut.end.tolist()) == ([12, 40, 70], [28, 58, 78])
    assert (cut.forward.tolist(), cut.sends.tolist()) == ([True, True, False], [0, 1, 0])
