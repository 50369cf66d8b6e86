from __future__ import annotations

from dataclasses import replace

from tests.analyses.made import Trace, job_of
from tracekit.analyses import coverage
from tracekit.job.model import Job
from tracekit.notes import Note, note, text_note
from tracekit.trace.events import Coverage


def job(*files: Coverage, notes: tuple[Note, ...] = (), missing: tuple[int, ...] = ()) -> Job:
    trace = Trace(0, 1)
    trace.step(1, 0, 100)
    trace.kernel("gemm", 10, 20, launch=5)
    return replace(job_of(trace), coverage=list(files), notes=list(notes), missing_ranks=list(missing), world_size=8)


def texts(of: Job) -> list[str]:
    return [finding.text for finding in coverage.analyze(of).findings()]


def test_missing_ranks_and_unreadable_files_are_warnings_that_name_them() -> None:
    found = coverage.analyze(
        job(
            Coverage("a/rank1.json", 1, "truncated", 11, notes=[text_note("the file ends in the middle of an event")]),
            Coverage("a/rank2.json.gz", 2, "truncated"),
            Coverage("a/notes.json", None, "skipped", notes=[text_note("no traceEvents")]),
            missing=(3, 5),
        )
    ).findings()
    assert [(f.id, f.severity, f.text) for f in found] == [
        ("coverage.missing_ranks", "warning", "2 of 8 ranks are missing: 3, 5."),
        ("coverage.truncated", "warning", "2 files end in the middle (truncated): rank1.json, rank2.json.gz."),
        ("coverage.skipped", "warning", "1 file could not be used: notes.json."),
    ]


def test_problems_that_differ_only_in_numbers_are_one_finding() -> None:
    found = coverage.analyze(
        job(
            Coverage("rank0.json", 0, notes=[text_note("7 of 90 kernels have no launch")]),
            Coverage("rank1.json", 1, notes=[text_note("9 of 91 kernels have no launch"), text_note("pg_count says 3")]),
        )
    ).findings()
    assert [f.text for f in found] == ["7 of 90 kernels have no launch (and alike in 1 more file).", "pg_count says 3."]
    assert found[0].evidence == "rank0.json, rank1.json" and found[0].severity == "info"


def test_notes_of_the_job_are_sentences_and_missing_ranks_are_said_once() -> None:
    notes = (note("world_size_not_recorded"), note("ranks_missing", 7, read=1, of="8", missing=(1,)))
    assert texts(job(notes=notes)) == ["The world size is not recorded: missing ranks cannot be told."]


def test_what_is_known_of_the_communication_is_counted_by_axis_and_kind() -> None:
    traces = [Trace(rank, 2) for rank in range(2)]
    for rank, trace in enumerate(traces):
        trace.step(1, 0, 1000)
        trace.collective("allreduce", 100, 50, seq=1, launch=10)
        trace.collective("allreduce", 200, 50, seq=2 + rank, launch=20)
        trace.collective("_allgather_base", 300, 50, launch=30)
        trace.kernel("nvshmem_broadcast_kernel(ncclDevComm*)", 400 + rank, 30, launch=90)
    result = coverage.analyze(job_of(*traces))
    assert result.known.to_dict("records") == [
        {"axis": "unknown", "kind": "broadcast", "operations": 2, "matched": 2, "by_order": 2, "group_known": 0, "bytes_known": 0},
        {"axis": "world", "kind": "all_gather", "operations": 2, "matched": 2, "by_order": 2, "group_known": 2, "bytes_known": 2},
        {"axis": "world", "kind": "all_reduce", "operations": 4, "matched": 2, "by_order": 0, "group_known": 2 * 2, "bytes_known": 4},
    ]
    finding = result.findings()[0]
    assert (finding.id, finding.severity) == ("coverage.unmatched", "warning")
    assert finding.text.startswith("2 of 8 communication operations are not matched")
    assert result.json() == {}
