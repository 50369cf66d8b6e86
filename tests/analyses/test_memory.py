"""Memory of a job: traces, snapshots and manifests brought together, sentences, charts."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from tests.analyses.made import job_of
from tests.builder import BASE
from tests.memory.made import MB, MemoryTrace, entry, segment, snapshot
from tracekit import analyses
from tracekit.analyses import memory
from tracekit.findings import StackedArea, StackedBars, Table, Timeline, Treemap
from tracekit.job.load import LoadOptions, load_job
from tracekit.job.model import Job
from tracekit.manifest import Manifest, Owners, Unit, encode

A, B, C = 0x1000, 0x2000, 0x3000
T = BASE // 1000


def training(
    rank: int = 0, world: int = 1, activations: int = 6 * MB, cuda: bool = True, older: int = 2 * MB, logits: int = 0
) -> MemoryTrace:
    """One step: activations from forward, a gradient from backward, what was there before."""
    trace = MemoryTrace(rank, world, cuda=cuda, older=older)
    trace.reserve(16 * MB)
    trace.step(7, 0, 1000)
    trace.kernel("gemm", 100, 50, launch=90)
    trace.annotation("forward", 80, 200)
    trace.annotation("backward", 300, 200)
    trace.annotation("Optimizer.step#Adam.step", 600, 100)
    trace.annotation("Optimizer.zero_grad#Adam.zero_grad", 700, 50)
    trace.annotation("unit layers.1", 100, 150)
    trace.operator("aten::mm", 110, 20)
    trace.alloc(120, A, activations)
    if logits:
        trace.operator("aten::_log_softmax", 200, 50)
        trace.alloc(210, C, logits)
    trace.alloc(350, B, 2 * MB)
    if logits:
        trace.free(390, C)
    trace.free(400, A)
    trace.free(710, B)
    return trace


def result(*traces: MemoryTrace) -> memory.Memory:
    return memory.analyze(job_of(*traces))


def test_the_peak_of_a_rank_down_to_names() -> None:
    (row,) = result(training()).json()["memory"]
    assert {key: row[key] for key in ("rank", "device", "peak_bytes", "peak_step", "peak_phase", "peak_unit", "start_bytes", "source")} == {
        "rank": 0,
        "device": "cuda:0",
        "peak_bytes": 10 * MB,
        "peak_step": 7,
        "peak_phase": "backward",
        "peak_unit": "layers.1",
        "start_bytes": 2 * MB,
        "source": "events",
    }
    assert {k: v for k, v in row["categories"].items() if v} == {"activations": 6 * MB, "gradients": 2 * MB, "before_recording": 2 * MB}
    assert row["units"] == [
        {"name": "layers.1", "category": "activations", "bytes": 6 * MB},
        {"name": None, "category": "gradients", "bytes": 2 * MB},
        {"name": None, "category": "before_recording", "bytes": 2 * MB},
    ]
    assert row["steps"] == [{"step": 7, "peak_bytes": 10 * MB, "peak_time_unix_ns": BASE + 350_000}]
    assert (row["reserved_peak_bytes"], row["fragmentation"]["free_bytes"]) == (16 * MB, 6 * MB)


def test_what_is_not_recorded_is_null_with_its_reason() -> None:
    trace = MemoryTrace()
    trace.kernel("gemm", 100, 50, launch=90)
    found = result(trace)
    assert found.json() == {
        "not_measured": {"memory": "the traces hold no memory events (profile_memory=True), and there is no memory snapshot"}
    }
    assert found.findings() == []
    assert found.sections() == []


def said(found: memory.Memory) -> dict[str, str]:
    return {finding.id: finding.text for finding in found.findings()}


def test_findings_name_the_peak_fragmentation_and_how_ranks_differ() -> None:
    found = said(result(training(0, 2), training(1, 2, activations=3 * MB)))
    assert found["memory.peak"] == (
        "Rank 0 (cuda:0) holds 10 MB in step 7, backward, at layers.1, the most of all ranks: "
        "activations 60%, gradients 20%, before recording 20%."
    )
    assert found["memory.imbalance"] == (
        "The peaks of the ranks differ: 10 MB on rank 0 (cuda:0), 7 MB on rank 1 (cuda:1). Most of it is activations "
        "(3 MB more, mostly layers.1)."
    )
    assert found["memory.fragmentation"] == ("At the peak of rank 1 (cuda:1), 56% of reserved memory is not in use: 9 MB of 16 MB.")


def test_equal_ranks_do_not_differ() -> None:
    assert "memory.imbalance" not in said(result(training(0, 2), training(1, 2)))


def test_logits_are_said() -> None:
    assert (
        said(result(training(logits=8 * MB)))["memory.logits"] == "The loss holds 8 MB of logits at the peak of rank 0 (cuda:0), 44% of it."
    )


def test_charts() -> None:
    (section,) = result(training(0, 2), training(1, 2)).sections()
    assert [type(chart) for chart in section.charts] == [StackedArea, StackedArea, StackedBars, Treemap, Table, Table]
    area = section.charts[0]
    assert isinstance(area, StackedArea)
    totals = [sum(column) for column in zip(*area.series.values(), strict=True)]
    assert max(totals) == 10 * MB
    assert area.marks == [(230.0, "peak")]
    assert area.lines["reserved"] == [16.0 * MB] * len(area.x)
    bars = section.charts[2]
    assert isinstance(bars, StackedBars)
    assert bars.series["activations"] == [6.0 * MB] * 2
    tree = section.charts[3]
    assert isinstance(tree, Treemap)
    assert dict(zip(tree.paths, tree.values, strict=True))[("activations", "layers.1", "aten::mm")] == 6 * MB


def test_many_ranks_show_the_highest_and_the_lowest_curve() -> None:
    ranks = [training(rank, 6, activations=(6 + rank) * MB) for rank in range(6)]
    (section,) = result(*ranks).sections()
    assert [chart.title for chart in section.charts if isinstance(chart, StackedArea)] == [
        "Memory of rank 5 (cuda:5) over time",
        "Memory of rank 0 (cuda:0) over time",
    ]


def test_of_chosen_steps_the_peak_is_theirs(tmp_path: Path) -> None:
    trace = training()
    trace.step(8, 1000, 500)
    trace.alloc(1100, A, 3 * MB)
    trace.free(1200, A)
    trace.write(tmp_path / "rank0.json")
    job = load_job([str(tmp_path)], LoadOptions(steps=(8, 9)), analyses.reducers())
    (row,) = memory.analyze(job).json()["memory"]
    assert (row["peak_bytes"], row["peak_step"]) == (5 * MB, 8)


# Files on disk: manifests and snapshots ------------------------------------------------------------------------------


def owners(*rows: tuple[float, int, int, str, str, str]) -> Owners:
    strings = list(dict.fromkeys(text for row in rows for text in row[3:]))
    columns = [[BASE + int(row[0] * 1000) for row in rows], [row[1] for row in rows], [row[2] for row in rows]]
    return Owners(*columns, *([strings.index(row[i]) for row in rows] for i in (3, 4, 5)), strings=strings)


def put(folder: Path, trace: MemoryTrace, manifest: Manifest | None = None, name: str = "rank_00000") -> None:
    trace.write(folder / f"{name}.pt.trace.json")
    if manifest is not None:
        (folder / f"{name}.manifest.json").write_bytes(encode(manifest))


def load(*paths: Path, ranks: frozenset[int] | None = None) -> tuple[Job, memory.Memory]:
    job = load_job([str(path) for path in paths], LoadOptions(ranks=ranks), analyses.reducers())
    return job, memory.analyze(job)


def test_a_manifest_names_every_owner(tmp_path: Path) -> None:
    told = owners((10, 0x9000, 2 * MB, "parameters", "w", "layers.0"), (121, A, 6 * MB, "gathered_parameters", "w", "layers.0"),
                  (351, B, 2 * MB, "gathered_parameters", "v", "layers.1"))  # fmt: skip
    units = [Unit("layers.0", "fsdp2", reshard_after_forward=False), Unit("layers.1", "fsdp2", reshard_after_forward=False)]
    put(tmp_path, training(), Manifest(owners=told, units=units))
    _, found = load(tmp_path)
    (row,) = found.json()["memory"]
    assert row["source"] == "manifest+events"
    assert {k: v for k, v in row["categories"].items() if v} == {"parameters": 2 * MB, "gathered_parameters": 8 * MB}
    assert said(found)["memory.gathered"] == (
        "2 units (layers.0, layers.1) hold full parameters at the peak of rank 0 (cuda:0): "
        "units stay gathered after forward (reshard_after_forward=False) costs 2 MB, 20% of the peak."
    )


def test_buckets_of_ddp_are_a_second_copy(tmp_path: Path) -> None:
    put(tmp_path, training(), Manifest(owners=owners((10, 0, 2 * MB, "communication_buffers", "bucket 0", ""))))
    _, found = load(tmp_path)
    assert said(found)["memory.ddp_buckets"] == (
        "DDP's buckets hold every gradient a second time: 2 MB on rank 0 (cuda:0), 20% of its peak."
    )


def history(device: int) -> bytes:
    """Two allocations of 3 MB and 1 MB on a device, and a third that failed."""
    events = [
        entry("segment_alloc", T, 4 * MB, A << 12),
        entry("alloc", T + 10, 3 * MB, A << 12, [("/job/model.py", 5, "forward")]),
        entry("alloc", T + 20, MB, (A << 12) + 3 * MB, [("/job/model.py", 6, "forward")]),
        entry("oom", T + 30, 9 * MB, frames=[("/job/model.py", 7, "forward")], device_free=512),
    ]
    blocks = [(3 * MB, "active_allocated"), (MB, "active_allocated")]
    return pickle.dumps(snapshot([[] for _ in range(device)] + [events], [segment(A << 12, 4 * MB, blocks, device=device)]))


def test_snapshots_alone_are_a_job(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"rank{rank}_snapshot.pickle").write_bytes(history(rank))
    job, found = load(tmp_path)
    assert job.ranks == [0, 1]
    rows = found.json()["memory"]
    assert [(row["rank"], row["device"], row["peak_bytes"], row["source"]) for row in rows] == [
        (0, "cuda:0", 4 * MB, "snapshot"),
        (1, "cuda:1", 4 * MB, "snapshot"),
    ]
    assert "9 MB were asked for (model.py:7 forward); the device had 512 B free" in said(found)["memory.out_of_memory"]
    _, only = load(tmp_path, ranks=frozenset({1}))
    assert [row["rank"] for row in only.json()["memory"]] == [1]


def test_a_snapshot_beside_a_trace_adds_what_the_trace_does_not_know(tmp_path: Path) -> None:
    put(tmp_path, training(), Manifest(owners=owners((121, A, 6 * MB, "activations", "x", ""))))
    (tmp_path / "rank_00000.memory_snapshot.pickle").write_bytes(history(0))
    job, found = load(tmp_path)
    assert len(job.windows) == 1
    (row,) = found.json()["memory"]
    assert (row["source"], row["peak_bytes"]) == ("manifest+events", 10 * MB)
    assert [failure["requested_bytes"] for failure in row["out_of_memory"]] == [9 * MB]
    assert row["reserved_end_by_pool"] == {"(0, 0)": 4 * MB}


def test_a_snapshot_whose_name_tells_no_rank_is_of_the_rank_of_its_device(tmp_path: Path) -> None:
    (tmp_path / "a_snapshot.pickle").write_bytes(history(1))
    (tmp_path / "b_snapshot.pickle").write_bytes(history(0))
    job, _ = load(tmp_path)
    assert [(window.rank, Path(window.coverage.file).name) for window in job.windows] == [
        (0, "b_snapshot.pickle"),
        (1, "a_snapshot.pickle"),
    ]
    assert "its name tells no rank: it is taken for rank 1" in job.windows[1].coverage.problems


def test_two_snapshots_of_one_device_and_no_rank_cannot_both_be_used(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}_snapshot.pickle").write_bytes(history(0))
    job, _ = load(tmp_path)
    assert [window.rank for window in job.windows] == [0]
    assert [entry.status for entry in job.coverage] == ["complete", "skipped"]
    assert "put it into the file's name" in job.coverage[1].problems[-1]


def test_a_snapshot_that_cannot_be_read_is_one_line_of_coverage(tmp_path: Path) -> None:
    put(tmp_path, training())
    (tmp_path / "rank0_snapshot.pickle").write_bytes(b"cos\nsystem\n(S'ls'\ntR.")
    job, found = load(tmp_path)
    (bad,) = [entry for entry in job.coverage if entry.status == "skipped"]
    assert "wants os.system" in bad.problems[0]
    assert len(found.json()["memory"]) == 1


@pytest.mark.parametrize("cuda", [True, False])
def test_the_report_of_every_source_is_drawn(tmp_path: Path, cuda: bool) -> None:
    from tracekit.report.document import document
    from tracekit.report.html import render

    put(tmp_path, training(cuda=cuda))
    (tmp_path / "rank0_snapshot.pickle").write_bytes(history(0))
    job, found = load(tmp_path)
    results = {"memory": found}
    written = render(results, document(job, results), "none")
    assert f"Memory of rank 0 ({'cuda:0' if cuda else 'cpu'}) over time" in written
    assert "treemap" in written


def test_the_life_of_sharded_units(tmp_path: Path) -> None:
    told = owners((121, A, 6 * MB, "gathered_parameters", "w", "layers.0"), (351, B, 2 * MB, "unsharded_gradients", "w", "layers.0"))
    put(tmp_path, training(), Manifest(owners=told))
    _, found = load(tmp_path)
    (row,) = found.json()["memory"]
    assert row["gathered_at_once"] == {"units": 1, "bytes": 6 * MB}
    assert [(span["unit"], span["state"], span["step"], span["phase"], span["bytes"]) for span in row["unit_lifecycle"]] == [
        ("layers.0", "full parameters", 7, "forward", 6 * MB),
        ("layers.0", "full gradient", 7, "backward", 2 * MB),
    ]
    section = found.sections()[1]
    assert section.lead.endswith("Most at one time: 1 unit, 6 MB of full parameters.")
    spans, table = section.charts
    assert isinstance(spans, Timeline)
    assert spans.spans["lane"].tolist() == ["layers.0", "layers.0"]
    assert isinstance(table, Table)
    assert table.frame["length_ns"].tolist() == [280.0, 360.0]
