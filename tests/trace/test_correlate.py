import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.builder import Trace
from tests.oracle import tables
from tracekit.trace import correlate
from tracekit.trace.events import Category


def named(t, rows):
    return [t.text(t.name[r]) if r >= 0 else None for r in rows]


def test_a_kernel_is_linked_by_correlation_never_by_external_id():
    trace = Trace()
    trace.operator("aten::mul", 0, 10, **{"External id": 77})
    trace.operator("record_param_comms", 20, 30)
    trace.kernel("ncclKernel", start=100, dur=50, launch=25, correlation=77, **{"External id": 77})
    t = tables(trace.text())
    kernels = t.rows(Category.KERNEL)
    launch = correlate.launches(t, kernels)
    assert named(t, launch) == ["cudaLaunchKernel"]
    assert named(t, correlate.enclosing(t, launch, t.rows(Category.OPERATOR))) == ["record_param_comms"]


def test_the_launching_call_wins_over_another_with_its_correlation():
    trace = Trace()
    trace.launch(5, 0, name="cudaEventQuery")
    trace.launch(5, 10, name="cudaLaunchKernelExC")
    trace.kernel("k", 20, 5, correlation=5)
    trace.kernel("lost", 30, 5, correlation=6)
    trace.kernel("none", 40, 5, correlation=0)
    t = tables(trace.text())
    assert named(t, correlate.launches(t, t.rows(Category.KERNEL))) == ["cudaLaunchKernelExC", None, None]


def test_instantiating_a_graph_launches_nothing():
    trace = Trace()
    trace.launch(5, 0, name="cudaGraphInstantiate")
    trace.launch(5, 10, name="cudaGraphLaunch")
    for i in range(2):
        trace.kernel("k", 20 + 5 * i, 5, correlation=5)
    trace.kernel("negative", 40, 5, correlation=-5)
    t = tables(trace.text())
    assert named(t, correlate.launches(t, t.rows(Category.KERNEL))) == ["cudaGraphLaunch", "cudaGraphLaunch", None]


def test_the_innermost_on_the_same_thread():
    trace = Trace()
    trace.operator("outer", 0, 100)
    trace.operator("inner", 10, 20)
    trace.operator("other thread", 0, 100, tid=9)
    trace.add("cuda_runtime", "a", 15, 1)
    trace.add("cuda_runtime", "b", 30, 1)
    trace.add("cuda_runtime", "c", 100, 1)
    t = tables(trace.text())
    calls, operators = t.rows(Category.RUNTIME), t.rows(Category.OPERATOR)
    assert named(t, correlate.enclosing(t, calls, operators)) == ["inner", "outer", None]
    assert named(t, correlate.enclosing(t, operators, operators)) == [None, "outer", None]


spans = st.lists(st.tuples(st.integers(1, 2), st.integers(0, 20), st.integers(-1, 12)), min_size=1, max_size=14)


@given(spans, st.lists(st.tuples(st.integers(1, 3), st.integers(0, 30)), max_size=10))
def test_enclosing_equals_the_obvious_search(operators, moments):
    trace = Trace()
    for tid, start, dur in operators:
        trace.operator("op", start, dur, tid=tid)
    for tid, start in moments:
        trace.add("cuda_runtime", "call", start, 0, tid=tid)
    t = tables(json.dumps(trace.document()))
    outer = t.rows(Category.OPERATOR)
    for inner in (outer, t.rows(Category.RUNTIME)):
        found = correlate.enclosing(t, inner, outer)
        for row, got in zip(inner, found, strict=True):
            open_then = [
                o
                for o in outer
                if o != row
                and t.lane[o] == t.lane[row]
                and t.ts[o] <= t.ts[row] < t.ts[o] + t.dur[o]
                and not (row in outer and t.ts[o] == t.ts[row] and (-t.dur[o], o) > (-t.dur[row], row))
            ]
            best = max(open_then, key=lambda o: (t.ts[o], -t.dur[o], o), default=-1)
            assert got == best, (operators, moments)


def test_no_rows_give_no_links():
    t = tables(Trace().text())
    nothing = np.empty(0, np.int64)
    assert len(correlate.launches(t, nothing)) == len(correlate.enclosing(t, nothing, nothing)) == 0
