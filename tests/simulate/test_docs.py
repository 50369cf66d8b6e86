"""What docs/simulate.md shows of every experiment is what the command prints today."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from tracekit.cli.main import cli
from tracekit.simulate.registry import EXPERIMENTS

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "simulate.md").read_text()
BLOCKS = re.findall(r"```\n\$ tracekit (simulate [^\n]*)\n(.*?)```", TEXT, re.DOTALL)


def _printed(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    done = CliRunner().invoke(cli, command.split())
    return [line.rstrip() for line in (done.stdout + done.stderr).splitlines()]


#: An error at float rounding: which one it is depends on the processor, and 0 is one of them.
ROUNDING = re.compile(r"(?<![\w.])(?:\d(?:\.\d+)?e-1[3-9]|0)(?![\w.%])")


def _lines(text):
    """Lines with single spaces, and one sign for every error at float rounding."""
    return "\n".join(ROUNDING.sub("~", " ".join(line.split())) for line in text.splitlines())


@pytest.mark.parametrize(("command", "shown"), BLOCKS, ids=[command for command, _ in BLOCKS])
def test_shown_output_is_real(command, shown, monkeypatch):
    printed = "\n".join(_printed(command, monkeypatch))
    exact = re.search(r"e-1[3-9]", shown) is None
    for part in shown.strip("\n").split("\n...\n"):
        assert part.rstrip() in printed if exact else _lines(part) in _lines(printed)


def test_every_experiment_is_shown():
    assert {command.split()[1] for command, _ in BLOCKS} == set(EXPERIMENTS)


def test_every_key_of_the_json_is_documented():
    done = CliRunner().invoke(cli, ["simulate", "pipeline", "--json", "-", "-q"])

    def keys(value):
        if isinstance(value, dict):
            for key, inner in value.items():
                yield key
                if key not in ("arguments", "rows"):
                    yield from keys(inner)
        elif isinstance(value, list):
            for inner in value:
                yield from keys(inner)

    documented = set(re.findall(r"[a-z_]+", " ".join(re.findall(r"`([^`]+)`", TEXT.partition("## The JSON")[2]))))
    assert set(keys(json.loads(done.stdout))) - documented == set()
