"""Owners that a manifest tells."""

import pytest

from tests import oracle
from tests.builder import BASE
from tests.memory.made import MemoryTrace
from tracekit.manifest import Owners
from tracekit.memory.attribution import attribute_trace
from tracekit.memory.peak import composition, holdings
from tracekit.memory.summary import of_trace
from tracekit.memory.timeline import logs_of
from tracekit.trace.steps import find_phases, find_steps
from tracekit.vocabulary import CATEGORIES

A, B = 0x1000, 0x2000


def owners(*rows: tuple[float, int, int, str, str, str]) -> Owners:
    """Registrations of (time [us], address, bytes, category, name, unit)."""
    strings = list(dict.fromkeys(text for row in rows for text in row[3:]))
    columns = [[BASE + int(row[0] * 1000) for row in rows], [row[1] for row in rows], [row[2] for row in rows]]
    return Owners(*columns, *([strings.index(row[i]) for row in rows] for i in (3, 4, 5)), strings=strings)


def attributed(trace: MemoryTrace, *rows: tuple[float, int, int, str, str, str]):
    tables = oracle.tables(trace.text())
    ((log, counters),) = logs_of(tables)
    return attribute_trace(tables, log, counters, find_phases(tables), find_steps(tables), owners(*rows))


def at(found, position: int) -> dict[str, int]:
    return {name: amount for name, amount in composition(found, position).items() if amount}


def trace_of(*events: tuple[float, int, int]) -> MemoryTrace:
    """A trace of (time, address, change)."""
    trace = MemoryTrace(backend="gloo", device=None)
    for time, address, change in events:
        if change > 0:
            trace.alloc(time, address, change)
        else:
            trace.free(time, address, -change)
    return trace


def test_a_registration_owns_the_block_that_is_live_at_its_address() -> None:
    trace = trace_of((10, A, 8), (20, A, -8), (30, A, 16), (40, A, -16))
    found = attributed(trace, (11, A, 8, "parameters", "w", "layers.0"), (31, A, 16, "inputs", "batch", ""))
    assert [at(found, i) for i in range(4)] == [{"parameters": 8}, {}, {"inputs": 16}, {}]
    assert found.from_manifest
    (holding,) = holdings(found, 0)
    assert (holding.name, holding.unit, holding.bytes) == ("w", "layers.0", 8)


def test_it_may_come_a_little_before_the_birth_or_after_the_death() -> None:
    trace = trace_of((10, A, 8), (1000, B, 4), (1010, B, -4))
    found = attributed(trace, (9, A, 8, "parameters", "w", ""), (1011, B, 4, "activations", "x", ""))
    assert at(found, 1) == {"parameters": 8, "activations": 4}


def test_the_latest_registration_counts_from_its_time_on() -> None:
    trace = trace_of((10, A, 8), (20, B, 1), (30, B, -1), (40, B, 1))
    found = attributed(trace, (12, A, 8, "unsharded_gradients", "w", "u"), (25, A, 8, "gradients", "w", ""))
    assert at(found, 0) == {"unsharded_gradients": 8}
    assert at(found, 1)["unsharded_gradients"] == 8
    assert at(found, 2)["gradients"] == 8


def test_what_autograd_saved_does_not_take_a_parameter_away() -> None:
    trace = trace_of((10, A, 8), (20, B, 4))
    rows = [(11, A, 8, "parameters", "w", ""), (12, A, 8, "activations", "saved", ""), (21, B, 4, "activations", "saved", "")]
    assert at(attributed(trace, *rows), 1) == {"parameters": 8, "activations": 4}


def test_a_registration_of_memory_that_the_trace_does_not_show_is_a_block_older_than_it() -> None:
    trace = trace_of((100, A, 8))
    found = attributed(trace, (50, B, 1000, "parameters", "w", ""), (60, B, 1000, "parameters", "w", ""))
    assert found.timeline.allocated.tolist() == [1000, 1008]
    assert at(found, 0) == {"parameters": 1000, "unattributed": 8}


def test_it_ends_where_the_trace_shows_another_block_at_its_address() -> None:
    trace = trace_of((100, A, 8), (300, B, 4))
    found = attributed(trace, (50, B, 1000, "gradients", "w", ""))
    assert found.timeline.allocated.tolist() == [1000, 1008, 12]


def test_an_older_gradient_ends_where_the_next_one_of_its_parameter_begins() -> None:
    trace = trace_of((100, A, 64), (200, 0x5000, 1))
    found = attributed(trace, (50, B, 64, "gradients", "w", ""), (110, A, 64, "gradients", "w", ""))
    assert found.timeline.allocated.tolist() == [64, 64, 65]


def test_storages_without_an_address_are_told_apart_by_name() -> None:
    trace = trace_of((100, A, 8))
    rows = [(50, 0, 64, "communication_buffers", f"bucket {i}", "") for i in (0, 1)]
    assert at(attributed(trace, *rows), -1) == {"communication_buffers": 128}


def test_ddp_s_first_buckets_end_where_it_builds_them_anew() -> None:
    trace = trace_of()
    for start in (0, 1000, 2000):
        trace.step(start // 1000, start, 900)
        trace.annotation("DistributedDataParallel.forward", start + 100, 200)
        trace.annotation("backward", start + 300, 200)
        trace.annotation("Optimizer.zero_grad#Adam.zero_grad", start + 700, 50)
    trace.alloc(1110, A, 64)
    trace.alloc(1350, B, 8)
    trace.free(1710, B)
    trace.alloc(2850, 0x9000, 1)
    found = attributed(trace, (50, 0, 64, "communication_buffers", "bucket 0", ""))
    assert [at(found, i).get("communication_buffers") for i in (-1, 0, 1)] == [64, 64, 64]
    assert found.timeline.allocated.tolist() == [64, 64, 72, 64, 65]


def test_what_an_older_free_says_and_a_registration_are_one_block() -> None:
    trace = trace_of((100, B, -64), (200, A, 8))
    found = attributed(trace, (50, B, 64, "gradients", "w", ""))
    assert [at(found, i) for i in (-1, 0)] == [{"gradients": 64}, {}]


def test_on_a_device_older_memory_that_is_registered_is_part_of_its_counter() -> None:
    trace = MemoryTrace(cuda=True, older=1000)
    trace.alloc(100, A, 8)
    found = attributed(trace, (50, B, 600, "parameters", "w", ""))
    assert found.timeline.allocated.tolist() == [1000, 1008]
    assert at(found, -1) == {"parameters": 600, "before_recording": 400}


@pytest.mark.parametrize("category", CATEGORIES)
def test_every_category_of_the_manifest_is_one_of_the_peak(category: str) -> None:
    assert at(attributed(trace_of((10, A, 8)), (11, A, 8, category, "", "")), 0) == {category: 8}


def test_numbers_that_cannot_be_true_own_nothing() -> None:
    found = attributed(
        trace_of((10, A, 8)), (11, A, 8, "parameters", "w", ""), (12, 2**70, 2**70, "gradients", "g", ""), (13, B, 2**60, "inputs", "", "")
    )
    assert at(found, 0) == {"parameters": 8}


def test_what_is_of_one_device_makes_no_block_of_another() -> None:
    trace = MemoryTrace(cuda=True, older=1000)
    trace.alloc(100, A, 8)
    trace._place, trace.total = {"Device Type": 0, "Device Id": -1}, 0
    trace.alloc(110, B, 64)
    tables = oracle.tables(trace.text())
    told = owners((120, B, 64, "optimizer_state", "step", ""), (120, 0x9000, 500, "parameters", "w", ""))
    host, device = of_trace(tables, find_phases(tables), find_steps(tables), told)
    assert {k: v for k, v in host.categories.items() if v} == {"optimizer_state": 64}
    assert {k: v for k, v in device.categories.items() if v} == {"parameters": 500, "before_recording": 500, "unattributed": 8}
