import errno
import re
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner, Result

from tracekit import __version__
from tracekit.cli import main
from tracekit.errors import InputError, PartialInputError


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main.cli, list(arguments))


def test_help_names_every_command_and_an_example() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert "Example: tracekit analyze traces/" in result.output
    for name, what in main.COMMANDS.items():
        assert re.search(rf"{name} +{re.escape(what)}", " ".join(result.output.split())), name


def test_version() -> None:
    assert run("--version").output == f"tracekit {__version__}\n"


@pytest.mark.parametrize("name", main.COMMANDS)
def test_every_command_has_help_with_an_example_and_the_exit_codes(name: str) -> None:
    result = run(name, "--help")
    assert result.exit_code == 0
    assert f"  tracekit {name} " in result.output
    assert "Exit codes:" in result.output


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from tracekit.cli.main import cli\n"
        "cli(['--help'], standalone_mode=False)\n"
        "print(sorted({'numpy', 'pandas', 'numba', 'pyarrow', 'plotly', 'jinja2', 'rich', 'fsspec'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_an_unknown_command_is_a_usage_error() -> None:
    result = run("analyse")
    assert result.exit_code == 2
    assert "there is no command 'analyse'; did you mean analyze?" in result.output


def failing(error: BaseException, *options: str) -> Result:
    """The result of a command that raises ``error``."""

    @click.command("fail")
    def command() -> None:
        raise error

    group = main.Tracekit("tracekit", params=main.cli.params, callback=lambda **_: None)
    group.get_command = lambda ctx, name: command  # type: ignore[method-assign]
    return CliRunner().invoke(group, [*options, "fail"])


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (InputError("a.json: empty file", "record it again"), 2, "tracekit: a.json: empty file; record it again\n"),
        (PartialInputError("1 of 2 files"), 3, "tracekit: 1 of 2 files\n"),
        (OSError(errno.ENOSPC, "No space left on device", "out.html"), 2, "tracekit: out.html: No space left on device\n"),
        (KeyboardInterrupt(), 130, "tracekit: interrupted\n"),
        (MemoryError(), 2, "tracekit: out of memory; --jobs 1 reads one file at a time, --ranks reads fewer\n"),
        (BrokenPipeError(), 0, ""),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(error: BaseException, code: int, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "silence_standard_output", lambda: None)
    result = failing(error)
    assert (result.exit_code, result.stderr, result.stdout) == (code, line, "")


def test_a_mistake_of_ours_is_one_line_that_asks_for_a_report() -> None:
    result = failing(ZeroDivisionError("division by zero"))
    assert result.exit_code == 2
    assert result.stderr.startswith("tracekit: internal error, ZeroDivisionError: division by zero; please report it")
    assert len(result.stderr.splitlines()) == 1


def test_debug_shows_the_traceback_and_keeps_the_exit_code() -> None:
    result = failing(PartialInputError("1 of 2 files"), "--debug")
    assert result.exit_code == 3
    assert "Traceback (most recent call last)" in result.stderr
    assert result.stderr.endswith("tracekit: 1 of 2 files\n")


def test_a_name_in_an_error_cannot_reach_the_terminal() -> None:
    result = failing(InputError("\x1b[2Jx\ny\u202e.json: empty file"))
    assert result.stderr == "tracekit: ␛[2Jx␊y[U+202E].json: empty file\n"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["hta", "queue-lenght", "x"], "there is no command 'queue-lenght'; did you mean queue-length?"),
        (["cache", "infos"], "there is no command 'infos'; did you mean info?"),
        (["simulate", "pipelines"], "there is no experiment 'pipelines'; did you mean pipeline?"),
    ],
)
def test_a_misspelt_command_below_a_command_comes_with_the_one_that_was_meant(arguments, told):
    done = run(*arguments)
    assert done.exit_code == 2 and told in done.output
