"""When sharded units are full."""

import numpy as np

from tests import oracle
from tests.builder import BASE
from tests.memory.made import MemoryTrace
from tests.memory.test_registered import owners
from tracekit.memory.attribution import attribute_trace
from tracekit.memory.lifecycle import Lifecycle, lifecycle
from tracekit.memory.timeline import logs_of
from tracekit.trace.steps import find_phases, find_steps
from tracekit.units import NULL

A, B, C, D, E, F = range(0x1000, 0x7000, 0x1000)


def two_units() -> MemoryTrace:
    """Units a (two parameters) and b: full in forward one after the other, in backward b is still full when a is gathered."""
    trace = MemoryTrace(backend="gloo", device=None)
    trace.step(4, 0, 1000)
    trace.annotation("forward", 50, 350)
    trace.annotation("backward", 400, 400)
    trace.alloc(100, A, 10)
    trace.alloc(101, B, 20)
    trace.free(200, A)
    trace.free(201, B)
    trace.alloc(210, C, 40)
    trace.free(300, C)
    trace.alloc(410, D, 40)
    trace.alloc(420, E, 40)  # b's full gradient
    trace.alloc(450, A, 30)
    trace.free(500, D)
    trace.free(510, E)
    trace.free(600, A)
    trace.alloc(900, F, 7)
    return trace


def lived(trace: MemoryTrace, *rows: tuple[float, int, int, str, str, str]) -> Lifecycle:
    tables = oracle.tables(trace.text())
    ((log, counters),) = logs_of(tables)
    phases, steps = find_phases(tables), find_steps(tables)
    return lifecycle(attribute_trace(tables, log, counters, phases, steps, owners(*rows) if rows else None), phases, steps)


FULL = (
    (102, A, 10, "gathered_parameters", "a.w", "a"),
    (102, B, 20, "gathered_parameters", "a.v", "a"),
    (211, C, 40, "gathered_parameters", "b.w", "b"),
    (411, D, 40, "gathered_parameters", "b.w", "b"),
    (421, E, 40, "unsharded_gradients", "b.w", "b"),
    (451, A, 30, "gathered_parameters", "a.w", "a"),
    (901, F, 7, "gathered_parameters", "r.w", ""),
)


def test_each_unit_is_full_in_forward_and_again_in_backward() -> None:
    found = lived(two_units(), *FULL)
    rows = [(s.unit, s.state, s.phase, (s.start_ns - BASE) // 1000, (s.end_ns - BASE) // 1000, s.bytes) for s in found.spans[:-1]]
    assert rows == [
        ("a", "full parameters", "forward", 100, 201, 30),
        ("b", "full parameters", "forward", 210, 300, 40),
        ("b", "full parameters", "backward", 410, 500, 40),
        ("b", "full gradient", "backward", 420, 510, 40),
        ("a", "full parameters", "backward", 450, 600, 30),
    ]
    assert {span.step for span in found.spans} == {4}


def test_a_unit_without_a_name_is_the_root_and_a_cut_span_has_no_end() -> None:
    last = lived(two_units(), *FULL).spans[-1]
    assert (last.unit, last.end_ns, last.bytes) == ("root", NULL, 7)


def test_how_many_units_were_full_at_one_time() -> None:
    found = lived(two_units(), *FULL)
    assert (found.most_units, found.most_bytes) == (2, 70)


def test_no_units() -> None:
    assert lived(two_units()) == Lifecycle([])


def test_by_torch_s_own_ranges_alone() -> None:
    trace = MemoryTrace(backend="gloo", device=None)
    trace.step(1, 0, 1000)
    trace.annotation("forward", 50, 350)
    for start, unit in ((100, "layers.0"), (200, "layers.1")):
        trace.annotation(f"FSDP::all_gather_copy_out ({unit})", start, 20)
        trace.alloc(start + 5, A + start, 64)
        trace.free(start + 150, A + start)
    found = lived(trace)
    assert [(span.unit, span.bytes) for span in found.spans] == [("layers.0", 64), ("layers.1", 64)]
    assert (found.most_units, found.most_bytes) == (2, 128)
    assert np.diff([span.start_ns for span in found.spans]).tolist() == [100_000]
