"""What grows from step to step, what two dumps differ in, and who keeps half-empty segments."""

import pickle

import pytest

from tests import oracle
from tests.memory.made import MB, MemoryTrace, entry, segment, snapshot
from tracekit.memory.compared import amounts, owner_changes
from tracekit.memory.summary import of_snapshot, of_trace
from tracekit.readers.memory_snapshot import read_snapshot
from tracekit.readers.sources import Source
from tracekit.trace.steps import find_phases, find_steps

A = 0x7F0000000000
T = 1_700_000_000_000_000
STEP = ("/job/adam.py", 30, "step")
KEEP = ("/job/train.py", 7, "log")


@pytest.fixture
def memory_of(tmp_path):
    def load(content):
        path = tmp_path / "rank0_snapshot.pickle"
        path.write_bytes(pickle.dumps(content))
        (found,) = of_snapshot(read_snapshot(Source(str(path), path.name, 0, 0)))
        return found

    return load


def trace(steps: int, kept: int = MB, cuda: bool = True, keeps=lambda step: True):
    """Each step (that ``keeps``) keeps a block and gives another one back; the first one also makes something that stays."""
    made = MemoryTrace(cuda=cuda)
    made.alloc(1, 0x9000, 10 * MB)
    for step in range(steps):
        start = 100 * step + 10
        made.step(step, start, 90)
        made.add("python_function", "/job/train.py(7): log", start + 10, 20)
        made.alloc(start + 1, 0x100000 + step, 5 * MB)
        if kept and keeps(step):
            made.alloc(start + 15, 0x200000 + step, kept)
        made.free(start + 80, 0x100000 + step)
    tables = oracle.tables(made.text())
    (found,) = of_trace(tables, find_phases(tables), find_steps(tables), None)
    return found


def test_what_every_step_keeps_grows() -> None:
    (growing,) = trace(6).growing
    assert (growing.bytes_per_step, growing.steps, growing.stack) == (MB, 4, ["/job/train.py(7): log"])


def test_what_is_freed_does_not_grow_and_three_steps_tell_nothing() -> None:
    assert trace(6, kept=0).growing == []
    assert trace(3).growing is None


def test_what_every_third_step_keeps_grows_and_what_some_steps_keep_once_does_not() -> None:
    (growing,) = trace(14, kept=3 * MB, keeps=lambda step: step % 3 == 0).growing
    assert (growing.bytes_per_step, growing.steps) == (3 * MB * 4 // 12, 12)
    assert trace(14, keeps=lambda step: step < 4).growing == []
    assert trace(14, keeps=lambda step: step in (3, 9)).growing == []


def history(steps: int):
    """A history without step marks: an optimizer's step ends each step; train.py:7 keeps 1024 bytes in each."""
    events, live, time = [entry("segment_alloc", T, 64 * 4096, A)], [], T
    for step in range(steps):
        at = A + 4096 * (2 * step)
        events.append(entry("alloc", time + 1, 1024, at, [KEEP]))
        for moment, line in ((2, ("/job/model.py", 5, "forward")), (5, STEP)):
            events += [
                entry("alloc", time + moment, 512, at + 4096, [line]),
                entry("free_requested", time + moment + 1, 512, at + 4096),
                entry("free_completed", time + moment + 2, 512, at + 4096),
            ]
        live.append(at)
        time += 10
    blocks, position = [], A
    for at in live:
        blocks += [(at - position, "inactive")] * (at > position) + [(1024, "active_allocated")]
        position = at + 1024
    blocks.append((A + 64 * 4096 - position, "inactive"))
    return snapshot([events], [segment(A, 64 * 4096, blocks)])


def test_in_a_snapshot_the_line_of_code_is_told_and_steps_end_with_the_optimizer(memory_of) -> None:
    (growing,) = memory_of(history(6)).growing
    assert (growing.bytes_per_step, growing.stack, growing.name) == (1024, ["train.py:7 log"], "train.py:7 log")


def moved(before, after):
    return owner_changes(*(amounts((o.category, o.unit, o.name, o.bytes) for o in found.end_owners) for found in (before, after)))


def test_two_snapshots_compared_tell_what_is_larger_and_their_difference(memory_of) -> None:
    before, after = memory_of(history(4)), memory_of(history(6))
    (change,) = moved(before, after)
    assert (change.kind, change.name, change.before, change.after) == (
        "larger",
        "train.py:7 log",
        3 * 1024,
        5 * 1024,
    )  # the last is another owner yet
    assert sum(c.after - c.before for c in moved(before, after)) == after.end - before.end
    empty = snapshot([[entry("segment_alloc", T, 4096, A)]], [segment(A, 4096, [(4096, "inactive")])])
    gone = moved(after, memory_of(empty))
    assert ({change.kind for change in gone}, sum(change.before for change in gone)) == ({"gone"}, 6 * 1024)


def test_half_empty_segments_are_kept_by_the_owner_of_their_blocks(memory_of) -> None:
    found = memory_of(history(6)).most_reserved
    pin = found.unused.pins[0]
    assert (pin.name, pin.segments, pin.bytes, pin.free) == ("train.py:7 log", 1, 5 * 1024, found.fragmentation.unused)


def test_segments_given_back_for_a_request_are_a_retry_and_those_of_empty_cache_are_not(memory_of) -> None:
    ask, empty = [("/job/model.py", 9, "forward")], [("/job/train.py", 3, "main")]
    large = 8 * 4096
    events = [
        entry("segment_alloc", T, 4096, A, ask),
        entry("segment_alloc", T + 1, 4096, A + 4 * 4096, ask),
        entry("segment_free", T + 2, 4096, A, empty),
        entry("segment_alloc", T + 3, 4096, A, ask),
        entry("alloc", T + 4, 512, A, ask),
        entry("free_requested", T + 5, 512, A),
        entry("free_completed", T + 6, 512, A),
        entry("segment_free", T + 7, 4096, A, ask),
        entry("segment_free", T + 8, 4096, A + 4 * 4096, ask),
        entry("segment_alloc", T + 9, large, A + 16 * 4096, ask),
        entry("alloc", T + 10, large, A + 16 * 4096, ask),
    ]
    (retry,) = memory_of(snapshot([events], [segment(A + 16 * 4096, large, [(large, "active_allocated")])])).retries
    assert (retry.requested, retry.given_back, retry.segments, retry.unused, retry.largest, retry.pieces) == (large, 8192, 2, 8192, 4096, 2)
    assert retry.frame == "model.py:9 forward"
    assert not retry.is_fragmentation
