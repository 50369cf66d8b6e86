"""``tracekit simulate``: options made from an experiment's arguments, what is printed and written, and exit codes."""

import json
import subprocess
import sys
from collections import namedtuple
from dataclasses import dataclass, field
from types import SimpleNamespace

import click
import pandas as pd
import pytest
from click.testing import CliRunner

from tracekit.cli import simulate
from tracekit.cli.main import cli
from tracekit.errors import UsageError
from tracekit.findings import Table
from tracekit.simulate.experiment import Bar, Call, Cell, Check, Experiment, Gantt, Message, Moment
from tracekit.simulate.registry import EXPERIMENTS, load

Answer = namedtuple("Answer", "code out err")


@pytest.fixture
def tracekit(monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")

    def run(*arguments):
        done = CliRunner().invoke(cli, ["simulate", *arguments])
        return Answer(done.exit_code, done.stdout, done.stderr)

    return run


@dataclass(frozen=True)
class _Arguments:
    micro_batches: int = field(default=4, metadata={"help": "Micro-batches of a step."})
    schedule: str = field(default="1f1b", metadata={"help": "Order.", "choices": ("gpipe", "1f1b")})
    width: int = field(default=8, metadata={"help": "Bits.", "choices": (8, 16)})
    share: float = field(default=0.5, metadata={"help": "A share."})
    causal: bool = field(default=True, metadata={"help": "Causal."})
    sizes: tuple[int, ...] = field(default=(1, 2), metadata={"help": "Sizes."})
    names: tuple[str, ...] = field(default=(), metadata={"help": "Names."})
    title: str = field(default="", metadata={"help": "A word."})


def _experiment(arguments, check):
    return Experiment(
        name="pipeline",
        title="A test",
        about="About it.",
        arguments=[(name, getattr(arguments, name)) for name in _Arguments.__dataclass_fields__],
        verdict="It works",
        tables=[Table("Numbers", pd.DataFrame({"a": [1, 2]}), {"a": "a [bytes]"}, preview=2)],
        moments=[
            Moment("start", "", [[Cell("W[0:2]", "parameter", 8, "[1, 2]")], []]),
            Moment("sent", "One goes.", [[], [Cell("W[0:2]", "parameter", 8)]], [Message(0, 1, "W[0:2]", 8)], 1),
        ],
        charts=[Gantt("Work", ["stage 0"], [Bar("stage 0", 0, 2, "F0", "forward"), Bar("stage 0", 2, 6, "B0", "backward")], "ms")],
        checks=[check],
        calls=[Call("send", "pp", "pipeline", 8, "forward", "activation")],
        notes=["A note."],
    )


@pytest.fixture
def fake(monkeypatch):
    """An experiment with an option of each type; gives the arguments it was run with."""
    seen = []

    def run(arguments):
        seen.append(arguments)
        if arguments.micro_batches == 17:
            raise UsageError("17 micro-batches for 4 stages", "give a multiple of 4")
        return _experiment(arguments, Check("bytes sent", 9 if arguments.micro_batches == 13 else 8, 8, "bytes", "S"))

    module = SimpleNamespace(Arguments=_Arguments, TITLE="A test", EXAMPLE="tracekit simulate pipeline --micro-batches 8", run=run)
    monkeypatch.setattr(simulate, "load", lambda name: module)
    return seen


def test_help_names_all_experiments_and_loads_none():
    code = (
        "import sys\nfrom tracekit.cli.main import cli\ncli.main(['simulate', '--help'], standalone_mode=False)\nprint(sorted(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    text, _, modules = done.stdout.rpartition("\n[")
    for name in EXPERIMENTS:
        assert f"  {name} " in text
    assert "Examples:" in text
    assert not {"'numpy'", "'pandas'", "'jinja2'"} & set(modules.replace("]", "").split(", "))


@pytest.mark.parametrize("name", list(EXPERIMENTS))
def test_every_experiment_has_the_agreed_shape(name, tracekit):
    module = load(name)
    assert module.EXAMPLE.startswith(f"tracekit simulate {name}")
    for described in module.Arguments.__dataclass_fields__.values():
        assert described.metadata["help"]
        assert type(described.default) in (int, float, str, bool, tuple)
    answer = tracekit(name, "--help")
    assert answer.code == 0
    assert " ".join(module.EXAMPLE.split()) in " ".join(answer.out.replace("\\\n", "").split())  # continued lines


@pytest.mark.parametrize("name", list(EXPERIMENTS))
def test_every_example_runs_and_holds(name, tracekit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = load(name).EXAMPLE.split()[2:]
    answer = tracekit(*words, "--json", "all.json")
    assert answer.code == 0, answer.err
    assert "checks" in answer.out.lower()
    found = json.loads((tmp_path / "all.json").read_bytes())
    assert found["experiment"] == name
    assert found["holds"]
    assert all(check["holds"] for check in found["checks"])
    assert found["tables"]


def test_options_are_the_fields_of_the_arguments(fake, tracekit):
    assert tracekit("pipeline").code == 0
    given = [
        "--micro-batches",
        "8",
        "--schedule",
        "gpipe",
        "--width",
        "16",
        "--share",
        ".25",
        "--no-causal",
        "--sizes",
        "3, 4,5",
        "--names",
        "a,b",
    ]
    assert tracekit("pipeline", *given, "--title", "x").code == 0
    assert fake == [_Arguments(), _Arguments(8, "gpipe", 16, 0.25, False, (3, 4, 5), ("a", "b"), "x")]


def test_help_shows_defaults_choices_and_the_example(fake, tracekit):
    text = tracekit("pipeline", "--help").out
    assert "--schedule [gpipe|1f1b]" in text
    assert "Micro-batches of a step.  [default: 4]" in text
    assert "--causal / --no-causal" in text
    assert "[default: (1,2)]" in text
    assert "tracekit simulate pipeline --micro-batches 8" in text


def test_everything_is_printed(fake, tracekit):
    lines = tracekit("pipeline").out.splitlines()
    text = "\n".join(lines)
    assert lines[0] == "A test"
    assert "micro_batches=4" in lines[2]
    assert "  0 -> 1  W[0:2]  8 B" in lines
    assert "  rank 0  W[0:2] [1, 2]   8 B" in [line.rstrip() for line in lines]
    assert "Checks: 1 of 1 hold" in text
    assert "✓  bytes sent" in text
    assert "send" in text
    assert "- A note." in lines
    assert lines[-1] == "It works"
    assert any(line.strip().startswith("stage 0 F0") and "B0··" in line for line in lines)


def test_moments_can_be_left_out(fake, tracekit):
    assert "rank 0" not in tracekit("pipeline", "--moments", "none").out


def test_json_on_standard_output_is_pure(fake, tracekit):
    answer = tracekit("pipeline", "--json", "-")
    assert json.loads(answer.out)["verdict"] == "It works"
    assert "It works" in answer.err


def test_quiet_prints_nothing(fake, tracekit):
    assert tracekit("pipeline", "-q") == Answer(0, "", "")


def test_a_failed_check_is_loud_and_ends_with_1(fake, tracekit, tmp_path):
    answer = tracekit("pipeline", "--micro-batches", "13", "-o", str(tmp_path / "p.html"))
    assert answer.code == 1
    assert "✗ FAILS" in answer.out
    assert "tracekit: CHECK FAILED: bytes sent: counted 9, has to be 8 bytes" in answer.err
    assert "1 of 1 checks failed" in answer.err
    assert "1 of 1 figures are not what they have to be" in (tmp_path / "p.html").read_text()
    assert tracekit("pipeline", "--micro-batches", "13", "-q").code == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["pipeline", "--micro-batches", "17"], "17 micro-batches for 4 stages; give a multiple of 4"),
        (["pipeline", "--micro-batches", "many"], "not a valid integer"),
        (["pipeline", "--sizes", "1,b"], "is no list of whole numbers; write it as 1,2,3"),
        (["pipeline", "--sizes", "1,,2"], "is no list of whole numbers"),
        (["pipeline", "--schedule", "fifo"], "'fifo' is not one of"),
        (["pipeline", "--sizes", ",".join("1" * 10_001)], "10001 items are more than"),
        (["pipeline", "-o", "nowhere/at/all.html"], "does not exist"),
        (["pipeline", "-o", "same.x", "--json", "same.x"], "cannot both be written"),
        (["nothing"], "there is no experiment 'nothing'"),
    ],
)
def test_a_wrong_option_ends_with_2_and_says_why(fake, tracekit, arguments, words):
    answer = tracekit(*arguments)
    assert answer.code == 2
    assert words in " ".join(answer.err.split())
    assert "Traceback" not in answer.err


def test_17_chunks_for_4_ranks(tracekit):
    answer = tracekit("collectives", "--kind", "all_reduce", "--chunks", "17")
    assert answer.code == 2
    assert answer.err == (
        "tracekit: 17 chunks for 4 ranks: a ring moves one chunk of each rank at a time, and 17 is no multiple of 4; "
        "give --chunks 16, or another multiple of 4\n"
    )


def test_an_unknown_experiment_is_a_key_error():
    with pytest.raises(KeyError):
        load("nothing")
    assert isinstance(simulate.command, click.Group)


@pytest.mark.parametrize("width", [20, 40, 80, 120])
def test_no_line_is_longer_than_the_terminal_and_no_figure_is_lost(fake, tracekit, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    answer = tracekit("pipeline", "--moments", "all")
    assert max(map(len, answer.out.splitlines())) <= width
    squeezed = "".join(answer.out.split())
    for word in ("start", "W[0:2]", "bytessent", "activation"):
        assert word in squeezed or width < 80


def test_verbose_says_how_long_it_took(fake, tracekit):
    answer = tracekit("pipeline", "-q", "-v")
    assert [line.split(" in ")[0] for line in answer.err.splitlines()] == ["computed", "written"]
