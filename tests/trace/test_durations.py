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
