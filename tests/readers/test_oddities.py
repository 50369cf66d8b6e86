"""Begin and end events, marks on a device, files of several processes, and what follows a trace."""

import json

import pytest

from tests.builder import Trace
from tracekit.errors import InputError
from tracekit.readers.kineto import read_trace, refuse_foreign
from tracekit.readers.oddities import unread
from tracekit.readers.sources import find_sources
from tracekit.trace.events import Category


def read(path):
    return read_trace(find_sources([str(path)]).sources[0])


def test_begin_and_end_on_a_thread_are_one_event_however_they_nest(tmp_path):
    trace = Trace()
    trace.kernel("gemm", 100, 50, launch=10)
    begins = (("outer", 0, 1), ("inner", 5, 1), ("other", 2, 2))
    ends = (("", 9, 1), ("", 20, 1), ("", 30, 2), ("", 40, 2))
    for name, at, tid in begins + ends:
        trace.add("user_annotation", name, at, tid=tid)["ph"] = "B" if name else "E"
    tables = read(trace.write(tmp_path / "rank0.json"))
    rows = tables.rows(Category.USER_ANNOTATION)
    assert {tables.text(int(tables.name[row])): int(tables.dur[row]) for row in rows} == {"outer": 20_000, "inner": 4_000, "other": 28_000}
    assert "1 event (ph B or E) without its other end: left out" in tables.coverage.problems


def test_waits_and_marks_of_a_command_processor_are_no_work(tmp_path):
    trace = Trace()
    for name, at in (("pe_exe", 0), ("event_wait", 10), ("event_record", 20), ("dma_request", 30)):
        trace.add("mtia_ccp_events", name, at, 5, pid=17, tid=3, stream=3)
    tables = read(trace.write(tmp_path / "rank0.json"))
    assert [Category(c).name for c in tables.category.tolist()] == ["KERNEL", "SYNC", "SYNC", "MEMCPY"]


def fused(*pids):
    trace = Trace(None)
    for number, pid in enumerate(pids):
        trace.pid, trace.gpu = pid, number
        trace.step(1, 0, 100)
        trace.kernel("gemm", 10 + 50 * number, 40, launch=1)
    return trace


@pytest.mark.parametrize("pids", [(1000, 1001), ("[TP00] 7", "[TP01] 8")])
def test_a_file_of_two_processes_is_never_one_rank(tmp_path, pids):
    with pytest.raises(InputError, match="holds several processes"):
        read(fused(*pids).write(tmp_path / "fused.json"))


def test_a_process_beside_the_one_that_works_is_no_second_rank(tmp_path):
    trace = fused(1000)
    trace.add("cuda_runtime", "cudaDeviceSynchronize", 5, 3, pid=77, tid=77)
    assert len(read(trace.write(tmp_path / "rank0.json")))


def test_a_second_document_behind_the_trace_is_named(tmp_path):
    text = fused(1000).text()
    (tmp_path / "rank0.json").write_text(text + "\n" + text)
    assert any("another one, which was not read" in problem for problem in read(tmp_path / "rank0.json").coverage.problems)


def test_braces_in_metadata_are_no_second_document(tmp_path):
    trace = fused(1000)
    document = {**trace.document(), "note": {"a": [{"b": "} x"}, {"c": 1}]}}
    (tmp_path / "rank0.json").write_text(json.dumps(document))
    assert read(tmp_path / "rank0.json").coverage.problems == []


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
def test_wide_text_is_named(tmp_path, encoding):
    (tmp_path / "rank0.json").write_bytes(fused(1000).text().encode(encoding))
    with pytest.raises(InputError, match=f"is written as {encoding[:6].upper()}, .*iconv -f {encoding[:6].upper()}"):
        read(tmp_path / "rank0.json")


def test_events_without_a_phase_are_complete_where_they_last(tmp_path):
    trace = fused(1000)
    for event in trace.events:
        event.pop("ph")
    tables = read(trace.write(tmp_path / "rank0.json"))
    assert len(tables.rows(Category.KERNEL)) == 1
    assert "3 events have no ph: with a time and a duration they are taken for complete" in tables.coverage.problems


def span(pid, tid, name):
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": 5, "dur": 3}


def process(pid, name):
    return {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}


@pytest.mark.parametrize(
    "events",
    [
        [process(1, "/device:GPU:0"), span(1, 14, "fusion"), process(7, "/host:CPU"), span(7, 1, "PjitFunction")],
        [process(30, "Ascend Hardware"), span(30, 2, "MatMulV2"), process(20, "CANN"), span(20, 1, "aclrtLaunch")],
        [span("Device 0", "Stream 7", "sgemm"), span("python", 3, "step")],
    ],
)
def test_device_work_of_other_profilers_is_seen_and_not_read(tmp_path, events):
    (tmp_path / "rank0.json").write_text(json.dumps({"traceEvents": events}))
    tables = read(tmp_path / "rank0.json")
    assert [tables.text(int(code)) for code in tables.name[unread(tables)]] == [
        event["name"] for event in events if event["ph"] == "X" and event["name"] in ("fusion", "MatMulV2", "sgemm")
    ]


def test_events_of_another_program_are_refused(tmp_path):
    events = [process(1, "MainProcess"), span(1, 1, "main (a.py:3)")]
    (tmp_path / "rank0.json").write_text(json.dumps({"traceEvents": events}))
    with pytest.raises(InputError, match=r"no operator, kernel or annotation: the 1 event in it is of another program \(main"):
        refuse_foreign(find_sources([str(tmp_path)]).sources[0], read(tmp_path / "rank0.json"))
