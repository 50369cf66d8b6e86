"""The CUDA caching allocator's rounding: what a tensor of some bytes really takes.

Source: c10/cuda/CUDACachingAllocator.cpp (kMinBlockSize, kSmallSize, kSmallBuffer, kMinLargeAlloc, kLargeBuffer, kRoundLarge). Blocks
round to 512 bytes. Requests of at most 1 MiB are cut from segments of 2 MiB, those below 10 MiB from segments of 20 MiB, larger ones get
a segment of their own, a multiple of 2 MiB. Each stream has its own segments.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from tracekit.estimate.padding import round_up

BLOCK = 512
SMALL_REQUEST, SMALL_SEGMENT = 2**20, 2 * 2**20
MIDDLE_REQUEST, MIDDLE_SEGMENT, LARGE_STEP = 10 * 2**20, 20 * 2**20, 2 * 2**20


def block_bytes(size: int) -> int:
    """Bytes of the block that holds a tensor; an empty tensor has none."""
    return round_up(size, BLOCK)


def rounding(sizes: Iterable[int]) -> int:
    """Bytes lost by rounding tensors of these sizes to blocks."""
    return sum(-size % BLOCK for size in sizes)


def reserved_bytes(sizes: Iterable[int]) -> int:
    """Bytes of the segments that hold these tensors, allocated in this order on one stream with none freed.

    A block is cut from the segment with the least room that is enough, which is how the allocator looks for one.
    """
    total = 0
    room: dict[int, list[int]] = {SMALL_SEGMENT: [], MIDDLE_SEGMENT: []}  # what is left in each segment, in order
    for size in sizes:
        block = block_bytes(size)
        if block == 0:
            continue
        if block >= MIDDLE_REQUEST:
            total += round_up(block, LARGE_STEP)
            continue
        segment = SMALL_SEGMENT if block <= SMALL_REQUEST else MIDDLE_SEGMENT
        place = bisect_left(room[segment], block)
        if place < len(room[segment]):
            left = room[segment].pop(place)
        else:
            left = segment
            total += segment
        if left > block:
            insort(room[segment], left - block)
    return total
