"""Commands about a report that stands: saved JSON as a page, what a recording lacks, completion, words that were meant."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.cli.test_analyze import traces  # noqa: F401 - a fixture
from tracekit.cli.main import cli


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def test_a_saved_document_becomes_a_page_and_markdown(traces: Path, tmp_path: Path) -> None:  # noqa: F811
    saved, page, text = tmp_path / "run.json", tmp_path / "run.html", tmp_path / "run.md"
    assert run("analyze", traces, "--no-report", "--no-cache", "-q", "--json", saved, "--markdown", text).exit_code == 0
    assert text.read_text(encoding="utf-8").startswith("# A step takes 1 ms on average")
    done = run("report", saved, "-o", page)
    assert done.output == f"Report: {page}\n"
    assert 'id="mean-step"' in page.read_text(encoding="utf-8")
    assert run("report", saved, "-o", page).output == f"Report: {page} (the one there was is replaced)\n"
    assert run("report", saved, "--markdown", "-").output == text.read_text(encoding="utf-8")


def test_what_is_no_document_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"a": 1}', encoding="utf-8")
    done = run("report", tmp_path / "x.json")
    assert done.exit_code == 2
    assert "is not what tracekit analyze --json writes" in done.stderr


def test_doctor_says_what_is_missing_and_how_to_record_it(traces: Path) -> None:  # noqa: F811
    done = run("doctor", traces, "--no-cache", "-q", "--json", "-")
    answers = {answer["question"]: answer for answer in json.loads(done.stdout)}
    assert answers["Which rank do the others wait for?"]["state"] == "yes"
    assert answers["Who owns the peak of memory?"]["state"] == "no"
    assert answers["Who owns the peak of memory?"]["how"].startswith("profile_memory=True")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_of_a_shell(shell: str) -> None:
    assert "_TRACEKIT_COMPLETE" in run("completion", shell).output


def test_two_outputs_in_one_place_are_refused(traces: Path, tmp_path: Path) -> None:  # noqa: F811
    done = run("analyze", traces, "--json", tmp_path / "a", "--markdown", tmp_path / "a")
    assert done.exit_code == 2
    assert "two outputs cannot both be written to" in done.stderr
