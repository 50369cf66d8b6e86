"""``tracekit.toml``, ``--config`` and ``--communication``."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.builder import Trace
from tracekit.cli.config import communication, configuration
from tracekit.cli.main import cli
from tracekit.errors import InputError, UsageError


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    made = Trace(0, 2)
    made.step(1, 0, 1000)
    made.kernel("our_exchange<8>(x)", 100, 400, stream=20, launch=10)
    return made.write(tmp_path / "rank0.json")


def analyze(path: Path, *options: str) -> Result:
    return CliRunner().invoke(cli, ["analyze", str(path), "--no-report", "--no-cache", "-q", "--json", "-", *options])


def axes(result: Result) -> list[tuple[str, str]]:
    return [(row["axis"], row["kind"]) for row in json.loads(result.stdout)["collectives"] or []]


def test_kernels_are_named_on_the_command_line_or_in_a_file(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert axes(analyze(trace)) == []
    assert axes(analyze(trace, "--communication", "our_.*=all_to_all:ep")) == [("ep", "all_to_all")]
    other = tmp_path / "other.toml"
    other.write_text('[communication]\n"exchange" = "all_gather"\n')
    assert axes(analyze(trace, "--config", str(other))) == [(None, "all_gather")]
    other.rename(tmp_path / "tracekit.toml")
    assert axes(analyze(trace)) == [(None, "all_gather")]
    assert axes(analyze(trace, "--communication", "our_.*=all_to_all:ep")) == [("ep", "all_to_all")]  # the option comes first


@pytest.mark.parametrize(
    "text", ["x", "[x]\n", "communication = 1\n", "\x00", '[communication]\n"(" = "all_gather"\n', "[communication]\na = 1\n"]
)
def test_a_file_that_makes_no_sense_is_one_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "a.toml"
    file.write_text(text)
    with pytest.raises((InputError, UsageError)) as caught:
        communication([], str(file))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_named_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no configuration file"):
        configuration(str(tmp_path / "none.toml"))
