"""Times that cannot be true are counted and left out; the rest of the trace keeps its figures."""

from tests.builder import BASE, Trace
from tests.oracle import tables
from tracekit.trace.durations import clean, span
from tracekit.trace.events import Category

US = 1000


def cleaned(trace):
    t = tables(trace.text())
    window = span(t)
    rows = t.rows(Category.KERNEL)
    return t, rows, clean(t, rows, window), tuple((x - BASE) // US for x in window)


def test_an_unset_stamp_is_not_the_start_of_the_trace():
    trace = Trace(base=None)
    now = 1_778_000_000_000_000
    trace.step(1, now, 1000)
    trace.kernel("good", now + 60, 250)
    trace.kernel("never stamped", 0, 0)
    t = tables(trace.text())
    rows = t.rows(Category.KERNEL)
    c = clean(t, rows, span(t))
    assert span(t) == (now * US, (now + 1000) * US)
    assert c.timeless.tolist() == [False, True]
    assert any("1 kernel " in p and "ts 0" in p for p in t.coverage.problems)


def test_unfinished_events_are_counted_never_summed():
    trace = Trace()
    trace.step(1, 0, 1000)
    trace.annotation("never ends", 900, -900)
    trace.add("python_function", "poll", 910, -1)
    trace.kernel("k", 100, 50)
    t, _, c, window = cleaned(trace)
    assert window == (0, 1000)
    assert (c.end[0] - BASE) // US == 150
    assert any("2 events have no end" in p for p in t.coverage.problems)


def test_a_kernel_longer_than_the_window_ends_at_the_next_of_its_stream():
    trace = Trace()
    trace.step(1, 0, 1000)
    trace.kernel("gemm", 60, 250)
    trace.kernel("add", 320, 1_600_000)
    trace.kernel("gemm", 345, 200)
    trace.kernel("add", 560, 7_447_466_400_000_000)
    trace.kernel("gemm", 585, 150)
    t, _, c, window = cleaned(trace)
    assert window == (0, 1000)
    assert c.suspicious.tolist() == [False, True, False, True, False]
    assert ((c.end - BASE) // US).tolist() == [310, 345, 545, 585, 735]
    assert any("2 kernels" in p and "duration" in p for p in t.coverage.problems)


def test_overlap_at_launch_is_legal():
    trace = Trace()
    trace.step(1, 0, 1000)
    for i in range(4):
        trace.kernel("k", 100 + 50 * i, "52.5")
    t, _, c, _ = cleaned(trace)
    assert not c.suspicious.any()
    assert t.coverage.problems == []


def test_a_long_kernel_over_many_others_of_its_stream_is_not_believed():
    trace = Trace()
    trace.step(1, 0, 100_000)
    trace.kernel("broken", 1000, 50_000)
    for i in range(8):
        trace.kernel("k", 2000 + 3000 * i, 2900)
    _, _, c, _ = cleaned(trace)
    assert c.suspicious.tolist() == [True] + 8 * [False]
    assert (c.end[0] - BASE) // US == 2000


def test_a_long_wait_at_the_end_of_the_window_is_believed():
    trace = Trace()
    trace.step(1, 0, 1000)
    trace.kernel("ncclDevKernel_AllReduce", 900, 5_000, stream=20)
    _, _, c, window = cleaned(trace)
    assert not c.suspicious.any()
    assert window == (0, 5900)


def test_a_broken_duration_with_nothing_after_it_is_not_believed():
    trace = Trace()
    trace.step(1, 0, 1000)
    trace.kernel("add", 100, 10)
    trace.kernel("add", 200, 14)
    trace.kernel("add", 300, 1_600_000)
    trace.kernel("alone", 400, 1_600_000, stream=8)
    _, _, c, window = cleaned(trace)
    assert window == (0, 1000)
    assert c.suspicious.tolist() == [False, False, True, True]
    assert ((c.end - BASE) // US).tolist() == [110, 214, 314, 400]


def test_one_broken_duration_does_not_excuse_another():
    """The window is the host's: a broken last kernel cannot stretch it until the others look short."""
    trace = Trace()
    trace.step(1, 0, 1000)
    trace.kernel("add", 100, 900_000)
    trace.kernel("mul", 200, 10)
    trace.kernel("add", 300, 2_000_000)
    _, _, c, window = cleaned(trace)
    assert window == (0, 1000)
    assert c.suspicious.tolist() == [True, False, True]
    assert ((c.end - BASE) // US).tolist() == [200, 210, 300]


def test_the_usual_duration_of_the_name_stands_in_for_a_broken_one():
    trace = Trace()
    trace.step(1, 0, 1000)
    for start, dur in ((10, 20), (40, 24), (70, 22), (100, 5_000_000)):
        trace.kernel("add", start, dur)
    trace.kernel("gemm", 700, 100)
    _, _, c, _ = cleaned(trace)
    assert (c.end[3] - BASE) // US == 122


def test_a_collective_may_run_beside_compute_on_a_stream_of_the_same_number():
    """ROCm names queues, and two streams can share one."""
    trace = Trace()
    trace.step(1, 0, 100_000)
    trace.collective("allreduce", 1000, 50_000, stream=0)
    for i in range(8):
        trace.kernel("k", 2000 + 3000 * i, 2900, stream=0)
    t, _, c, _ = cleaned(trace)
    assert not c.suspicious.any()
    assert t.coverage.problems == []


def test_kernels_of_one_graph_launch_may_overlap():
    trace = Trace()
    trace.step(1, 0, 100_000)
    trace.kernel("wide", 1000, 50_000, correlation=9)
    for i in range(8):
        trace.kernel("k", 2000 + 3000 * i, 2900, correlation=9)
    _, _, c, _ = cleaned(trace)
    assert not c.suspicious.any()


def test_work_that_outlasts_a_short_host_window_is_believed():
    """The host launched everything within 50 us and left; the overlap at launch stays legal."""
    trace = Trace()
    trace.annotation("launch all", 0, 50)
    for i in range(4):
        trace.kernel("k", 100 + 10_000 * i, 10_002)
    _, _, c, window = cleaned(trace)
    assert not c.suspicious.any()
    assert window == (0, 40_102)


def test_an_unset_stamp_shortly_after_the_base_is_still_unset():
    trace = Trace()
    trace.kernel("never stamped", 0, 0)
    trace.kernel("first", 5_000_000, 10)
    trace.step(1, 5_000_000, 1000)
    t = tables(trace.text())
    rows = t.rows(Category.KERNEL)
    assert span(t) == (BASE + 5_000_000 * US, BASE + 5_001_000 * US)
    assert clean(t, rows, span(t)).timeless.tolist() == [True, False]
    assert any("1 kernel " in p and "ts 0" in p for p in t.coverage.problems)


def test_an_empty_kernel_at_the_start_of_a_trace_from_zero_is_kept():
    trace = Trace(base=None)
    trace.step(1, 0, 1000)
    trace.kernel("empty", 0, 0)
    t = tables(trace.text())
    assert not clean(t, t.rows(Category.KERNEL), span(t)).timeless.any()


def test_a_trace_of_kernels_only_has_the_window_of_its_kernels():
    trace = Trace()
    trace.kernel("broken", 0, 1_600_000)
    trace.kernel("k", 100, 50)
    trace.kernel("k", 200, 50)
    _, _, c, window = cleaned(trace)
    assert window == (0, 250)
    assert c.suspicious.tolist() == [True, False, False]
    assert c.end[0] == BASE + 100 * US


def test_unfinished_events_of_a_cpu_job_are_noted_too():
    trace = Trace()
    trace.operator("aten::mm", 0, 10)
    trace.operator("aten::never", 5, -1)
    t = tables(trace.text())
    assert span(t) == (BASE, BASE + 10 * US)
    assert t.coverage.problems == ["1 event has no end (negative or missing duration): left out of every sum"]


def test_copies_are_called_copies():
    trace = Trace(base=None)
    now = 1_778_000_000_000_000
    trace.step(1, now, 1000)
    trace.kernel("Memcpy HtoD", 0, 0, cat="gpu_memcpy")
    trace.kernel("k", 0, 0)
    t = tables(trace.text())
    rows = t.rows(Category.KERNEL, Category.MEMCPY)
    assert clean(t, rows, span(t)).timeless.all()
    assert any(p.startswith("1 kernel and 1 copy without a time (ts 0)") for p in t.coverage.problems)


def test_durations_that_overflow_are_not_believed():
    trace = Trace()
    trace.step(1, 0, 1000)
    trace.kernel("k", 100, 9_000_000_000_000_000)
    trace.kernel("k", 200, 50)
    _, _, c, window = cleaned(trace)
    assert window == (0, 1000)
    assert c.suspicious.tolist() == [True, False]
    assert ((c.end - BASE) // US).tolist() == [150, 250]


def test_no_events_have_no_window():
    t = tables(Trace().text())
    assert span(t) == (0, 0)
    assert len(clean(t, t.rows(Category.KERNEL), (0, 0)).end) == 0
