import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.memory.made import log
from tracekit.memory.blocks import live_bytes, pair, standing


def rows(*events):
    blocks = pair(log(*events))
    return [tuple(row) for row in np.stack([blocks.address, blocks.bytes, blocks.birth, blocks.death, blocks.lost]).T.tolist()]


def test_an_allocation_and_its_free_are_one_block() -> None:
    assert rows((0, 100, 8), (1, 200, 4), (2, 100, -8)) == [(100, 8, 0, 2, 0), (200, 4, 1, 3, 0)]


def test_a_new_allocation_at_a_live_address_closes_the_old_block() -> None:
    assert rows((0, 100, 8), (1, 100, 16), (2, 100, -16)) == [(100, 8, 0, 1, 1), (100, 16, 1, 2, 0)]


def test_a_free_without_allocation_is_of_a_block_older_than_the_log() -> None:
    blocks = pair(log((0, 100, -8), (1, 100, 4)))
    assert blocks.born_before.tolist() == [True, False]
    assert (blocks.bytes.tolist(), blocks.birth.tolist(), blocks.death.tolist()) == ([8, 4], [-1, 1], [0, 2])


def test_between_two_frees_of_one_address_an_allocation_was_lost() -> None:
    assert rows((0, 100, 8), (1, 100, -8), (2, 200, 1), (3, 100, -32)) == [(100, 8, 0, 1, 0), (100, 32, 1, 3, 0), (200, 1, 2, 4, 0)]


def test_events_without_address_make_no_block() -> None:
    assert rows((0, None, 8), (1, None, -8), (2, 100, 0)) == []


def test_times_of_birth_and_death() -> None:
    events = log((10, 100, 8), (20, 100, -8), (30, 200, -1), (40, 300, 2))
    blocks = pair(events)
    order = np.argsort(blocks.address)
    null = np.iinfo(np.int64).min
    assert blocks.born_ns(events)[order].tolist() == [10, null, 40]
    assert blocks.freed_ns(events)[order].tolist() == [20, 30, null]


def test_live_blocks_at_a_moment() -> None:
    blocks = pair(log((0, 100, 8), (1, 200, 4), (2, 100, -8)))
    assert [blocks.live(i).tolist() for i in (-1, 0, 1, 2)] == [[False, False], [True, False], [True, True], [False, True]]


def test_standing_blocks_are_there_all_the_time() -> None:
    older = standing(np.array([1, 2]), np.array([10, 20]), 3)
    assert live_bytes(older, 3).tolist() == [30, 30, 30, 30]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 50), st.booleans()), max_size=40))
def test_the_blocks_are_what_a_hand_replay_finds(steps) -> None:
    """With a table of live addresses: allocations replace, frees of nothing are of something older."""
    events, live, curve = [], {}, []
    for time, (address, size, allocates) in enumerate(steps):
        if allocates:
            live[address] = size
            events.append((time, address, size))
        else:
            size = live.pop(address, size)
            events.append((time, address, -size))
        curve.append(dict(live))
    blocks = pair(log(*events))
    found = live_bytes(blocks, len(events))
    for i, expected in enumerate(curve):
        alive = blocks.where(blocks.live(i))
        seen = {a: b for a, b, d in zip(alive.address.tolist(), alive.bytes.tolist(), alive.birth_row.tolist(), strict=True) if d >= 0}
        assert seen == expected  # what was born unseen is on top
        assert found[i + 1] == alive.bytes.sum()
