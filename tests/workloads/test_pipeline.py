"""Pipelines: one message a boundary, direction and micro-batch; every piece of work once in the trace; same parameters in the end."""

from __future__ import annotations

import gzip
import importlib
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.workloads.recording import Recording, as_counted, check, check_matches, job_of, needs_torch, record, run
from tracekit.errors import UsageError

pytestmark = needs_torch


def pieces_of_work(recording: Recording, rank: int) -> Counter[str]:
    """How often each range ``PP:<stage><F, B, I or W><micro-batch>`` stands in the trace of a rank."""
    path = recording.folder / f"rank_{rank:05d}.pt.trace.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return Counter(e["name"] for e in events if e.get("ph") == "X" and re.fullmatch(r"PP:\d+[FBIW]\d+", e["name"]))


def pieces_wanted(stages: list[int], actions: str, micro_batches: int, steps: int) -> dict[str, int]:
    return {f"PP:{stage}{action}{i}": steps for stage in stages for action in actions for i in range(micro_batches)}


@pytest.mark.parametrize(
    ("arguments", "schedule", "stages", "messages", "actions"),
    [
        (("pipeline_gpipe",), "gpipe", {"0": [0], "1": [1]}, (4, 4), "FB"),
        (("pipeline_1f1b",), "1f1b", {"0": [0], "1": [1]}, (4, 4), "FB"),
        (("pipeline_interleaved",), "interleaved_1f1b", {"0": [0, 2], "1": [1, 3]}, (12, 12), "FB"),
        (("pipeline_interleaved", "--zero-bubble", "interleaved"), "interleaved_zero_bubble", {"0": [0, 2], "1": [1, 3]}, (12, 12), "FIW"),
        (("pipeline_interleaved", "--zero-bubble", "zbv"), "zbv", {"0": [0, 3], "1": [1, 2]}, (8, 8), "FIW"),
    ],
)
def test_messages_and_work_of_every_micro_batch(
    tmp_path: Path, arguments: tuple[str, ...], schedule: str, stages: dict[str, list[int]], messages: tuple[int, int], actions: str
) -> None:
    recording = record(tmp_path, *arguments, "--verify", "--active", "2")
    check(recording)
    check_matches(recording)
    for rank, manifest in recording.manifests.items():
        assert manifest.notes[0].startswith("verified")
        said = manifest.pipeline
        assert (said["schedule"], said["microbatches"], said["stage_of_rank"]) == (schedule, 4, stages)
        assert pieces_of_work(recording, rank) == pieces_wanted(stages[str(rank)], actions, 4, 2)
        count, size = messages[rank], 64 * 2 * 128 * 4  # s b h elements of 4 bytes
        assert as_counted(manifest.expected) == {
            ("send", "pp", "pipeline"): (count, count * size),
            ("recv", "pp", "pipeline"): (count, count * size),
        }


def test_a_stage_in_the_middle_has_two_neighbours(tmp_path: Path) -> None:
    """One rank of a larger mesh alone, on the group that moves nothing."""
    recording = record(tmp_path, "pipeline_1f1b", "--backend", "fake", "--mesh", "pp=4,tp=2", "--rank", "3", "--active", "1")
    check(recording)
    assert as_counted(recording.manifests[3].expected)["send", "pp", "pipeline"][0] == 8
    assert [tuple(g.ranks) for g in recording.manifests[3].groups if g.axis == "pp"] == [(1, 3, 5, 7)]


def test_under_fp16_all_stages_skip_a_step_together(tmp_path: Path) -> None:
    recording = record(tmp_path, "pipeline_gpipe", "--precision", "fp16", "--active", "1")
    check(recording)
    assert as_counted(recording.manifests[0].expected)["all_reduce", "pp", "metrics"] == (1, 4)


@pytest.mark.parametrize(
    ("workload", "arguments", "problem"),
    [
        ("pipeline_gpipe", ["--layers", "3"], "3 layers do not divide into 2 ranks x 1 stages"),
        ("pipeline_gpipe", ["--batch", "6"], "6 samples do not divide"),
        ("pipeline_1f1b", ["--micro-batches", "1"], "1f1b needs as many micro-batches as stages: 2, not 1"),
        ("pipeline_interleaved", ["--micro-batches", "5", "--batch", "5"], "5 micro-batches do not divide"),
        ("pipeline_interleaved", ["--virtual-stages", "0"], "4 layers do not divide into 2 ranks x 0 stages"),
        ("pipeline_interleaved", ["--virtual-stages", "1", "--zero-bubble", "zbv"], "zbv has two stages a rank, not 1"),
    ],
)
def test_what_a_schedule_cannot_run_is_refused(workload: str, arguments: list[str], problem: str) -> None:
    module = importlib.import_module(f"tracekit.workloads.{workload}")
    job, options = job_of(module, arguments)
    with pytest.raises(UsageError, match=problem):
        module.expected(job, options)


def test_a_refusal_is_one_line(tmp_path: Path) -> None:
    done = run("record", "pipeline_gpipe", "--layers", "3", "-o", str(tmp_path), expect=2)
    assert "3 layers do not divide" in done.stderr
    assert "Traceback" not in done.stderr


def test_stages_run_round_and_round_or_as_a_v() -> None:
    from tracekit.workloads import pipeline_interleaved as workload

    job, options = job_of(workload, ["--nproc", "4", "--layers", "8"])
    loop = workload.plan(job, options)
    v = workload.plan(job, replace(options, zero_bubble="zbv"))
    assert [loop.rank_of(stage) for stage in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [v.rank_of(stage) for stage in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert [list(v.layers_of(stage)) for stage in v.stages_of(1)] == [[1], [6]]
