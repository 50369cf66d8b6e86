"""The recorded hangs of sample_traces: each is named right. Four ranks on gloo, made by record_hangs.py."""

from pathlib import Path

import pytest

from tests.real import CASES
from tracekit.analyses.hang import analyze
from tracekit.job.load import LoadOptions, load_job

SAMPLES = Path(__file__).resolve().parents[1] / "sample_traces"
SOURCE = (SAMPLES / "record_hangs.py").read_text().splitlines()


def line_of(text: str, after: str = "def ") -> str:
    """Where a line of the scenes stands, as stacks have it."""
    start = next(number for number, line in enumerate(SOURCE) if after in line)
    return f"record_hangs.py:{next(number for number, line in enumerate(SOURCE[start:], start + 1) if text in line)}"


def found(name: str):
    hang = analyze(load_job([str(SAMPLES / name)], LoadOptions()))
    assert hang.root is not None
    return hang.root, hang.findings()[0].text, hang


def test_one_sleeps():
    root, text, hang = found("hang_sleep")
    assert (root.why, root.ranks, sorted(call.rank for call in hang.waits[0].waiting)) == ("busy", [2], [0, 1, 3])
    assert text.startswith(
        f"Ranks 0, 1, 3 wait in all_reduce seq 6 of the default group ({line_of('dist.all_reduce(gradients)', 'def sleeps')})"
    )
    assert text.endswith(f"for rank 2, which is in sleeps, at {line_of('time.sleep(600)', 'def sleeps')}.")


def test_one_skips_a_collective():
    root, text, _ = found("hang_skip")
    assert (root.why, root.ranks) == ("skipped", [1])
    assert f"left out the all_reduce seq 9 of the default group ({line_of('dist.all_reduce(loss)', 'def skips')})" in text


def test_two_groups_in_opposite_order():
    root, text, _ = found("hang_order")
    assert (root.why, root.ranks) == ("order", [0, 1])
    where = line_of("dist.all_reduce(first", "def opposite")
    assert f"rank 0 in all_reduce seq 4 of tp at {where}, rank 1 in all_reduce seq 4 of dp at {where}" in text


def test_other_shapes():
    root, text, _ = found("hang_shapes")
    assert (root.why, root.ranks) == ("mismatch", [3])
    assert text.startswith(f"Rank 3 called all_gather of [[2000]] Float -> [[4,2000]] Float at {line_of('all_gather_into', 'def shapes')}")


def test_one_is_killed():
    root, text, hang = found("hang_killed")
    assert (root.why, root.ranks) == ("died", [3])
    assert any(3 in wait.blamed and wait.group.description == "tp" for wait in hang.waits)
    assert "the last call that it completed with others is all_reduce" in text


def test_one_waits_for_its_data():
    root, text, hang = found("hang_data_loader")
    assert (root.why, root.ranks) == ("busy", [1])
    assert text == f"Rank 0 waits in all_reduce seq 4 of tp ({line_of('group=tp', 'def data_loader')}) for rank 1, which waits for its data loader, at {line_of('time.sleep(600)', '__getitem__')}."  # fmt: skip # noqa: E501
    assert {(edge.rank, edge.waits_for) for edge in hang.edges} == {(0, 1), (3, 1), (2, 0)}


def test_a_pipeline_whose_stage_raises():
    root, text, _ = found("hang_pipeline")
    assert (root.why, root.ranks) == ("raised", [1])
    assert f"ValueError: stage 1 got an activation that is not finite, at {line_of('raise ValueError', 'def pipeline')}" in text
    assert f"in recv, at {line_of('dist.recv', 'def pipeline')}" in text


@pytest.mark.skipif(not (CASES / "U28_flight_recorder_beside").is_dir(), reason="the given cases are not beside the project")
def test_the_given_case():
    job = load_job([str(CASES / "U28_flight_recorder_beside")], LoadOptions())
    hang = analyze(job)
    assert job.ranks == [0, 1]
    assert [(wait.call.seq, wait.group.name, wait.missing) for wait in hang.waits] == [(3, "0", [1])]
