"""Begin and end events, marks on a device, files of several processes, and what follows a trace."""

import json

import pytest

from tests.builder import Trace
from tracekit.errors import InputError
from tracekit.readers.kineto import read_trace
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


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_utf_16_is_named(tmp_path, encoding):
    (tmp_path / "rank0.json").write_bytes(fused(1000).text().encode(encoding))
    with pytest.raises(InputError, match="UTF-16"):
        read(tmp_path / "rank0.json")
