"""Help that fits into the terminal: what click keeps as it is written (examples, exit codes) is broken where a line is too long."""

from __future__ import annotations

import re
import textwrap

import click

from tracekit.errors import choose

#: An example with a remark behind it.
_REMARK = re.compile(r"^(\s*\S.*?)\s{3,}(?:#\s)?(\S.*)$")
#: Words of a command line: what stands in quotes is one, an option and its value are.
_WORD = re.compile(r"""(?:-{1,2}[a-z][\w-]*\s+(?!-))?(?:"[^"]*"|'[^']*'|\S)+""")
_COMMAND = re.compile(r"^\s+(tracekit|python|srun|torchrun|mpirun|eval|source)\b")


class Formatter(click.HelpFormatter):
    """click's, with every line broken that is wider than the terminal."""

    def getvalue(self) -> str:
        """The whole help."""
        return "\n".join(fitted(line, self.width) for line in super().getvalue().split("\n"))


class Context(click.Context):
    """A context whose help fits."""

    formatter_class = Formatter


class Group(click.Group):
    """Commands below a command; one that does not exist comes with the one that looks like it."""

    noun = "command"

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, with the names that were likely meant."""
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            raise click.UsageError(f"there is no {self.noun} {args[0][:80]!r}; {choose(args[0], self.list_commands(ctx))}", ctx)
        return super().resolve_command(ctx, args)


def fitted(line: str, width: int) -> str:
    """One line as one or several of at most ``width`` characters: a command is continued behind a backslash, words move down."""
    if len(line) <= width:
        return line
    indent = " " * (len(line) - len(line.lstrip()))
    if not _COMMAND.match(line):
        wrapper = textwrap.TextWrapper(width, indent, indent, break_long_words=False, break_on_hyphens=False)
        return wrapper.fill(line.strip())
    remark = _REMARK.match(line)
    if remark is not None:
        below = textwrap.fill(f"# {remark[2]}", width, initial_indent=indent + "  ", subsequent_indent=indent + "  # ")
        return f"{fitted(remark[1], width)}\n{below}"
    lines = [indent]
    for word in _WORD.findall(line):
        start = not lines[-1].strip()
        if not start and len(lines[-1]) + 1 + len(word) > width - 2:
            lines[-1] += " \\"
            lines.append(f"{indent}  {word}")
        else:
            lines[-1] += word if start else f" {word}"
    return "\n".join(lines)
