import numpy as np
import pytest

from tests import oracle
from tests.memory.made import MemoryTrace, log
from tracekit.memory.blocks import pair, standing
from tracekit.memory.timeline import Counters, device_name, logs_of, replay
from tracekit.units import NULL


def counters(total, reserved=None, of_host=True):
    none = np.full(len(total), NULL, np.int64)
    return Counters(np.array(total, np.int64), none if reserved is None else np.array(reserved, np.int64), of_host)


def test_the_curve_is_the_device_s_own_counter() -> None:
    found = replay(log((0, 100, 8), (1, 200, 4), (2, 100, -8)), counters([8, 12, 4]))
    assert found.allocated.tolist() == [0, 8, 12, 4]
    assert (found.peak(), found.start_bytes, found.end_bytes, found.recorded) == (1, 0, 4, 12)
    assert found.notes == []


def test_memory_older_than_the_log_is_what_the_counter_had_before_its_first_event() -> None:
    found = replay(log((0, 100, 8), (1, 900, -20), (2, 100, -8)), counters([108, 88, 80]))
    assert found.allocated.tolist() == [100, 108, 88, 80]
    assert found.unexplained.tolist() == [80, 80, 80, 80]  # 20 of the 100 are the block that is freed
    assert found.peak() == 0


def test_the_host_s_counter_never_hears_of_a_lost_free() -> None:
    found = replay(log((0, 100, 8), (1, 100, 8), (2, 200, 1)), counters([8, 16, 17]))
    assert found.allocated.tolist() == [0, 8, 8, 9]
    assert found.recorded == 17
    assert "1 free is not in the trace (8 B)" in found.notes[0]
    assert "8 B less than the highest Total Allocated" in found.notes[1]


def test_the_device_s_counter_does() -> None:
    found = replay(log((0, 100, 8), (1, 100, 8), (2, 200, 1)), counters([8, 8, 9], of_host=False))
    assert found.allocated.tolist() == [0, 8, 8, 9]
    assert found.unexplained.tolist() == [0, 0, 0, 0]


def test_a_rise_of_the_counter_that_no_event_explains_is_unexplained() -> None:
    found = replay(log((0, 100, 8), (1, 200, 4)), counters([8, 30], of_host=False))
    assert found.allocated.tolist() == [0, 8, 30]
    assert found.unexplained.tolist() == [0, 0, 18]


def test_without_a_counter_amounts_are_the_least_that_is_possible() -> None:
    found = replay(log((0, None, 8), (1, None, -20), (2, None, 4)), counters([NULL] * 3))
    assert found.allocated.tolist() == [12, 20, 0, 4]
    assert found.least
    assert found.recorded == NULL
    assert "the least possible" in found.notes[0]


def test_blocks_known_from_elsewhere_lie_below_everything() -> None:
    events = log((0, 100, 8), (1, 100, -8))
    older = standing(np.array([500]), np.array([1000]), 2)
    found = replay(events, counters([8, 0]), pair(events).joined(older))
    assert found.allocated.tolist() == [1000, 1008, 1000]


def test_a_peak_before_the_first_event() -> None:
    found = replay(log((5, 100, -8)), counters([2]))
    assert found.allocated.tolist() == [10, 2]
    assert (found.peak(), found.time_of(found.peak())) == (-1, 5)


def test_each_device_has_a_log_of_its_own_in_order_of_time() -> None:
    trace = MemoryTrace()
    trace.alloc(20, 0x100, 8)
    trace.alloc(10, 0x200, 4)
    trace._place = {"Device Type": 1, "Device Id": 1}
    trace.alloc(15, 0x300, 2)
    trace._place = {"Device Type": 6, "Device Id": 0}
    trace.alloc(16, 0x400, 1)
    found = [(events.device, events.change.tolist()) for events, _ in logs_of(oracle.tables(trace.text()))]
    assert found == [("cpu", [4, 8]), ("cuda:1", [2]), ("cuda:0", [1])]


def test_reserved_memory_is_recorded_of_devices_only() -> None:
    trace = MemoryTrace(cuda=True)
    trace.reserve(64)
    trace.alloc(1, 0x100, 8)
    ((events, found),) = logs_of(oracle.tables(trace.text()))
    assert replay(events, found).reserved.tolist() == [64, 64]
    ((events, found),) = logs_of(oracle.tables(_on_host().text()))
    assert replay(events, found).reserved.tolist() == [NULL, NULL]


def _on_host() -> MemoryTrace:
    trace = MemoryTrace()
    trace.alloc(1, 0x100, 8)
    return trace


@pytest.mark.parametrize(
    ("kind", "index", "name"), [(0, -1, "cpu"), (1, 3, "cuda:3"), (6, 0, "cuda:0"), (12, 1, "xpu:1"), (77, 0, "device type 77:0")]
)
def test_names_of_devices(kind: int, index: int, name: str) -> None:
    assert device_name(kind, index) == name


def test_no_memory_events_no_logs() -> None:
    trace = MemoryTrace()
    trace.kernel("gemm", 0, 10)
    assert logs_of(oracle.tables(trace.text())) == []


@pytest.mark.parametrize(("span", "peak"), [(None, 1), ((31, 99), 3), ((20, 21), 1), ((21, 25), 1), ((0, 10), -1)])
def test_the_peak_of_a_part_includes_what_stands_when_it_begins(span, peak: int) -> None:
    events = log((10, 100, 4), (20, 200, 8), (30, 200, -8), (40, 300, 1))
    assert replay(events, counters([4, 12, 4, 5])).peak(span) == peak


def test_sizes_that_cannot_be_true_are_left_out_and_said() -> None:
    trace = MemoryTrace()
    trace.alloc(1, 0x100, 8)
    trace.alloc(2, 0x200, 2**60)
    tables = oracle.tables(trace.text())
    ((events, _),) = logs_of(tables)
    assert events.change.tolist() == [8]
    assert any("1 memory events have no size" in problem for problem in tables.coverage.problems)
