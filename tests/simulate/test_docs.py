"""What docs/simulate.md shows of the collectives, the mesh and the formats is what the command prints today."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from tracekit.cli.main import cli

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "simulate.md").read_text()
BLOCKS = re.findall(r"```\n\$ tracekit (simulate [^\n]*)\n(.*?)```", TEXT, re.DOTALL)


def _printed(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    done = CliRunner().invoke(cli, command.split())
    return [line.rstrip() for line in (done.stdout + done.stderr).splitlines()]


@pytest.mark.parametrize(("command", "shown"), [block for block in BLOCKS if block[0].split()[1] in ("collectives", "mesh", "precision")])
def test_shown_output_is_real(command, shown, monkeypatch):
    printed = "\n".join(_printed(command, monkeypatch))
    for part in shown.strip("\n").split("\n...\n"):
        assert part.rstrip() in printed


def test_every_experiment_is_shown():
    assert {command.split()[1] for command, _ in BLOCKS} >= {"collectives", "fsdp", "zero", "pipeline", "experts", "mesh", "precision"}


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
