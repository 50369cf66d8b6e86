"""Help fits into the terminal, and every command has an example."""

from __future__ import annotations

import shlex

import pytest
from click.testing import CliRunner

from tracekit.cli.help import fitted
from tracekit.cli.main import COMMANDS, cli

_INNER = [("simulate", "fsdp"), ("simulate", "pipeline"), ("hta", "queue-length"), ("cache", "clear")]


@pytest.mark.parametrize("width", [72, 80, 120])
@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS), *_INNER], ids=" ".join)
def test_no_line_of_help_is_wider_than_the_terminal(command: tuple[str, ...], width: int) -> None:
    result = CliRunner().invoke(cli, [*command, "--help"], terminal_width=width)
    assert result.exit_code == 0
    assert [line for line in result.output.splitlines() if len(line) > width] == []


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)], ids=" ".join)
def test_every_command_has_an_example(command: tuple[str, ...]) -> None:
    text = CliRunner().invoke(cli, [*command, "--help"]).output
    assert "Example" in text


@pytest.mark.parametrize("width", range(30, 90, 7))
def test_a_broken_command_is_the_same_command(width: int) -> None:
    line = """    tracekit query traces/ "SELECT axis, sum(sent_bytes) FROM operations" --format csv -o 'a file.csv'"""
    assert shlex.split(fitted(line, width).replace("\\\n", " ")) == shlex.split(line)


def test_a_remark_stands_below_its_command() -> None:
    line = "    tracekit record ddp --help          what the workload does, and all its options"
    assert fitted(line, 60) == "    tracekit record ddp --help\n      # what the workload does, and all its options"


def test_a_value_stays_beside_its_option() -> None:
    assert fitted("    tracekit check run1/ --baseline baseline.json --thresholds gate.toml", 60) == (
        "    tracekit check run1/ --baseline baseline.json \\\n      --thresholds gate.toml"
    )
