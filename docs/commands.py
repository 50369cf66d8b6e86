"""Write docs/commands/, a page a command, from the commands' own help.

python docs/commands.py            write them
python docs/commands.py --check    say which are out of date, with exit code 1
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from tracekit.cli.main import COMMANDS, cli

FOLDER = Path(__file__).parent / "commands"
_WIDTH = 100
#: Command -> pages that say more, with what they say.
SEE = {
    "analyze": [("reading.md", "how to read each chart"), ("json.md", "the JSON"), ("traces.md", "what a trace must hold")],
    "report": [("reading.md", "how to read each chart"), ("json.md", "the JSON")],
    "doctor": [("traces.md", "which answer needs what"), ("recording.md", "how to record")],
    "cache": [("clusters.md", "large jobs")],
    "compare": [("regression.md", "what is compared, and how many recordings it takes")],
    "baseline": [("regression.md", "baselines and gates")],
    "check": [("regression.md", "baselines and gates")],
    "export": [("export.md", "the merged trace and the tables")],
    "hta": [("export.md", "Holistic Trace Analysis")],
    "query": [("api.md", "the tables, in SQL and in Python")],
    "estimate": [("estimate.md", "the plan, and how far to trust it"), ("predicted.md", "predicted and measured")],
    "record": [("recording.md", "the reference workloads")],
    "run": [("recording.md", "recording without touching the program"), ("clusters.md", "jobs of several nodes")],
    "simulate": [("simulate.md", "the experiments")],
}


def pages() -> dict[str, str]:
    """File name -> text of every page."""
    found = {f"{name}.md": _page(name) for name in COMMANDS}
    rows = [f"| [`tracekit {name}`]({name}.md) | {text} |" for name, text in COMMANDS.items()]
    head = ["# The commands", "", "Every page is the command's own help; a test compares.", "", "| command | what it does |", "|-|-|"]
    found["README.md"] = "\n".join([*head, *rows]) + "\n"
    return found


def _page(name: str) -> str:
    root = cli.make_context("tracekit", [], resilient_parsing=True)
    command = cli.get_command(root, name)
    if command is None:
        raise KeyError(name)
    lines = [f"# `tracekit {name}`", "", COMMANDS[name], ""]
    lines += [f"- [{text}](../{page})" for page, text in SEE.get(name, [])]
    lines += ["" if name in SEE else None, "```text", _help(command, root, name), "```"]  # type: ignore[list-item]
    if isinstance(command, click.Group):
        context = _context(command, root, name)
        for inner in command.list_commands(context):
            below = command.get_command(context, inner)
            if below is not None:
                lines += ["", f"## `tracekit {name} {inner}`", "", "```text", _help(below, context, inner), "```"]
    return "\n".join(line for line in lines if line is not None) + "\n"


def _context(command: click.Command, parent: click.Context, name: str) -> click.Context:
    return command.context_class(command, info_name=name, parent=parent, terminal_width=_WIDTH)


def _help(command: click.Command, parent: click.Context, name: str) -> str:
    return command.get_help(_context(command, parent, name)).rstrip()


def main() -> int:
    """Write the pages, or with ``--check`` name those that are out of date."""
    given = pages()
    if "--check" in sys.argv:
        wrong = [name for name, text in given.items() if not (FOLDER / name).is_file() or (FOLDER / name).read_text() != text]
        wrong += [path.name for path in FOLDER.glob("*.md") if path.name not in given]
        for name in wrong:
            print(f"docs/commands/{name} is out of date: python docs/commands.py", file=sys.stderr)
        return 1 if wrong else 0
    FOLDER.mkdir(exist_ok=True)
    for name, text in given.items():
        (FOLDER / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
