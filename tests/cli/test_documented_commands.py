"""Every command line of the README, the documents and the help is one that tracekit takes: command, options, and how many arguments."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from tracekit.cli.main import COMMANDS, cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*/README.md"))]
_FENCED = re.compile(r"^```(?:sh|bash|console|yaml|text)?\n(.*?)^```", re.DOTALL | re.MULTILINE)
#: Where the rest belongs to another program.
_FOREIGN = {"record", "run"}


def _lines(text: str) -> list[str]:
    """Lines that begin with tracekit, continued ones joined; in ``inline code`` those that have an option or an argument."""
    found = []
    for block in _FENCED.findall(text):
        for line in re.sub(r"\\\n\s*", " ", block).split("\n"):
            command = re.match(r"\s*(?:\$ |- run: )?(?:PYTHONPATH=\S+ )?(tracekit [a-z].*)", line)
            if command and command[1].split()[1] in COMMANDS:
                found.append(command[1])
    found += [each for each in re.findall(r"`(tracekit [a-z]+ [^`\n]+)`", text) if each.split()[1] in COMMANDS]
    return found


def _given() -> list[tuple[str, str]]:
    return sorted({(page.relative_to(ROOT).as_posix(), line) for page in PAGES for line in _lines(page.read_text(encoding="utf-8"))})


def _words(line: str) -> list[str]:
    """Arguments as a shell would give them, without a remark, a pipe or a redirection behind them."""
    words = shlex.split(re.split(r"\s{2,}(?:five|what|the|#)|\s#\s", line)[0], comments=False)
    end = next((i for i, word in enumerate(words) if word in ("|", ">", "&&", ";", "<(") or word.startswith(">")), len(words))
    return words[1:end]


@pytest.mark.parametrize(("page", "line"), _given(), ids=lambda value: value[:60])
def test_a_documented_command_line_is_taken(page: str, line: str) -> None:
    words = _words(line)
    context = cli.make_context("tracekit", [], resilient_parsing=True)
    command = cli.get_command(context, words[0])
    assert command is not None
    rest = words[1:]
    if isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        inner = command.get_command(context, rest[0])
        if inner is None and re.fullmatch(r"[A-Z]+|[a-z-]+\|[a-z|-]+", rest[0]):
            return  # a placeholder
        assert inner is not None, rest[0]
        command, rest = inner, rest[1:]
    if words[0] in _FOREIGN and "--" in rest:
        rest = rest[: rest.index("--")]
    if words[0] == "record":
        return  # its options are those of a workload, which has tests of its own
    below = command.context_class(command, info_name=words[0], parent=context)
    options = {name for parameter in command.get_params(below) if isinstance(parameter, click.Option)
               for name in (*parameter.opts, *parameter.secondary_opts)}  # fmt: skip
    unknown = [word for word in rest if re.match(r"--?[a-zA-Z]", word) and word.partition("=")[0] not in options]
    assert unknown == []


def test_there_are_such_lines() -> None:
    assert len(_given()) > 60


def test_the_pages_of_the_commands_follow_their_help() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "docs" / "commands.py"), "--check"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_links_between_the_documents_lead_somewhere() -> None:
    link = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
    targets = [(page, target) for page in PAGES for target in link.findall(page.read_text(encoding="utf-8"))]
    inside = [(page, target) for page, target in targets if not target.startswith(("http://", "https://"))]
    assert [(page.name, target) for page, target in inside if not (page.parent / target).exists()] == []
    assert len(inside) > 50
