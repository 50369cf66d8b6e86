"""Collectives alone: right results, a table as nccl-tests prints it, and in the trace exactly the calls that were made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.workloads.recording import as_counted, check, check_matches, job_of, needs_torch, record, run
from tracekit.errors import UsageError

pytestmark = needs_torch

EVERYTHING = {
    "broadcast",
    "scatter",
    "gather",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "all_to_all_v",
    "send_recv",
    "barrier",
}


def test_every_collective_is_checked_timed_and_recorded(tmp_path: Path) -> None:
    sizes = ("--min-bytes", "1024", "--max-bytes", "4096")
    recording = record(tmp_path, "collectives", "--nproc", "4", "--verify", "--iterations", "3", *sizes)
    check(recording)
    check_matches(recording)
    assert recording.manifests[0].notes == ["verified: the results of 21 collectives were right on every rank"]
    rows = [json.loads(line) for line in (tmp_path / "collectives.jsonl").read_text().splitlines()]
    assert {row["collective"] for row in rows} == EVERYTHING
    assert all(row["wrong"] == 0 and row["time_us"] > 0 and row["ranks"] == 4 for row in rows)
    by = {(row["collective"], row["size_bytes"]): row for row in rows}
    reduced, gathered = by["all_reduce", 4096], by["all_gather", 4096]
    assert reduced["algbw_gb_s"] == pytest.approx(4096 / reduced["time_us"] / 1e3)
    assert reduced["busbw_gb_s"] == pytest.approx(reduced["algbw_gb_s"] * 1.5)
    assert gathered["busbw_gb_s"] == pytest.approx(gathered["algbw_gb_s"] * 0.75)
    assert (reduced["count"], gathered["count"]) == (1024, 256)
    assert by["barrier", 0]["algbw_gb_s"] is None
    assert recording.counted(2, 1)["all_reduce", "dp_replicate", "metrics"] == (6, 3 * (1024 + 4096))


def test_a_wrong_result_is_counted() -> None:
    import torch
    from tracekit.workloads.common.bench import Case, wrong_elements

    result = torch.zeros(4)
    case = Case(lambda: result.copy_(torch.tensor([1.0, 2, 3, 4])), result, lambda: torch.tensor([1.0, 0, 3, 0]), result)
    assert wrong_elements(case) == 2
    assert result.tolist() == [0, 0, 0, 0]  # ready to be summed into again


@pytest.mark.parametrize(("ranks", "place", "wanted"), [(2, 1, [2, 1]), (3, 0, [1, 2, 3]), (3, 2, [3, 1, 2])])
def test_what_a_rank_sends_to_another_it_gets_from_it(ranks: int, place: int, wanted: list[int]) -> None:
    from tracekit.workloads.common.bench import pieces

    assert pieces(place, ranks) == wanted == [pieces(other, ranks)[place] for other in range(ranks)]


def test_any_axis_and_element_type_and_sizes_that_do_not_divide(tmp_path: Path) -> None:
    chosen = ("--axis", "tp", "--only", "scatter,all-to-all-v", "--dtype", "bfloat16", "--min-bytes", "100", "--max-bytes", "100")
    recording = record(tmp_path, "collectives", "--mesh", "dp_replicate=1,tp=3", "--iterations", "2", *chosen)
    check(recording)
    assert as_counted(recording.manifests[1].expected) == {
        ("scatter", "tp", "metrics"): (3, 3 * 48 * 2),  # 50 elements: 48 divide into 3 shares
        ("all_to_all", "tp", "metrics"): (3, 3 * 48 * 2),  # and into 1 + 2 + 3 parts
    }


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--only", "all_reduc"], "there is no such collective"),
        (["--nproc", "1"], "one rank"),
        (["--min-bytes", "8", "--max-bytes", "4"], "no sizes from 8 to 4 bytes"),
        (["--iterations", "0"], "--iterations 0 is too small"),
        (["--axis", "tp"], "the mesh has no such axis"),
    ],
)
def test_options_that_make_no_sense_are_refused(arguments: list[str], problem: str) -> None:
    from tracekit.workloads import collectives

    job, options = job_of(collectives, arguments)
    with pytest.raises(UsageError, match=problem):
        collectives.expected(job, options)


def test_a_mistake_is_told_in_one_line(tmp_path: Path) -> None:
    done = run("record", "collectives", "--only", "all_reduc", "-o", str(tmp_path), expect=2)
    assert "there is no such collective" in done.stderr
    assert "Traceback" not in done.stderr
