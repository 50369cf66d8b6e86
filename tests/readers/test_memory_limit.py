"""A trace of more events than may be held: its first steps as they are, and a word on the others."""

from __future__ import annotations

import numpy as np
import pytest

from tests.builder import Trace
from tracekit import analyses
from tracekit.job import load
from tracekit.job.options import LoadOptions
from tracekit.job.window import Task, read_window
from tracekit.notes import sentences
from tracekit.readers.kineto import read_trace
from tracekit.readers.sources import find_sources
from tracekit.trace.events import Category

STEPS = 40


def source(tmp_path, order=lambda events: events, marked=True):
    trace = Trace(0, 1)
    for step in range(STEPS):
        begin = 1000 * step
        if marked:
            trace.step(step, begin, 990)
        for number in range(10):
            trace.kernel(f"gemm{number % 3}", begin + 60 + 95 * number, 80, launch=begin + 20 + 90 * number, op="aten::mm")
    trace.events = order(trace.events)
    trace.write(tmp_path / "rank0.json")
    return find_sources([str(tmp_path)]).sources[0]


def backwards(events):
    return events[::-1]


@pytest.mark.parametrize("order", [list, backwards])
@pytest.mark.parametrize("chunk", [2000, None])
def test_the_first_part_by_time_is_kept_whatever_the_order_of_the_file(tmp_path, order, chunk):
    file = source(tmp_path, order)
    whole, part = read_trace(file), read_trace(file, most_rows=400, chunk=chunk)
    assert part.kept_until is not None and whole.kept_until is None
    early = (whole.ts < part.kept_until) | whole.each_text(whole.name, lambda text: text.startswith("ProfilerStep"))
    assert 100 < len(part) <= 400
    for name in ("ts", "dur", "correlation", "stream", "category"):
        np.testing.assert_array_equal(getattr(part, name), getattr(whole, name)[early])
    assert [part.text(code) for code in part.name] == [whole.text(code) for code in whole.name[early]]
    assert part.coverage.events == whole.coverage.events


def test_arguments_stay_with_their_events(tmp_path):
    trace = Trace(0, 2)
    for number in range(300):
        trace.collective("allreduce", 100 * number, 50, elements=number + 1, launch=100 * number - 20, seq=number, ranks=[0, 1])
    trace.write(tmp_path / "rank0.json")
    part = read_trace(find_sources([str(tmp_path)]).sources[0], most_rows=200)
    side = part.side["communication"]
    assert 0 < len(side) < 400
    kernels = part.rows(Category.KERNEL)
    number = (part.ts[kernels] - part.ts[kernels].min()) // 100_000
    np.testing.assert_array_equal(side.columns["In msg nelems"][side.at(kernels)], number + 1)


def test_figures_of_the_steps_that_are_kept_are_those_of_all(tmp_path):
    file = source(tmp_path)
    reducers = {name: reducer for name, reducer in analyses.reducers().items() if name in ("breakdown", "kernels", "idle")}
    part = read_window(file, Task(reducers=reducers, most_rows=600))
    count = len(part.steps)
    assert 1 < count < STEPS
    asked = read_window(file, Task(reducers=reducers, steps=(None, count)))
    assert part.steps.number.tolist() == asked.steps.number.tolist() == list(range(count))
    np.testing.assert_equal(vars(part.reduced["breakdown"]), vars(asked.reduced["breakdown"]))
    notes = sentences(part.coverage.notes)
    assert any(f"its first {count} of {STEPS} steps" in text for text in notes)
    assert not any("have no kernel" in text for text in notes)


def test_an_answer_of_a_part_is_not_kept_for_a_run_with_more_memory(tmp_path, monkeypatch):
    source(tmp_path)
    monkeypatch.setattr(load, "LEAST_ROWS", 400)
    job = load.load_job([str(tmp_path)], LoadOptions(memory_limit=1))
    assert (job.settled, load.load_job([str(tmp_path)], LoadOptions()).settled) == (False, True)


def test_without_marks_of_steps_the_first_part_is_looked_at(tmp_path):
    window = read_window(source(tmp_path, marked=False), Task(most_rows=400))
    assert any("marks no steps" in text for text in sentences(window.coverage.notes))


def test_one_step_that_is_too_long_asks_for_more_memory(tmp_path):
    with pytest.raises(MemoryError, match="one step alone"):
        read_window(source(tmp_path), Task(most_rows=70))
