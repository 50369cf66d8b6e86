"""Failures a user can act on: every one carries a remedy and the exit code of the command that meets it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def choose(word: str, known: Iterable[str]) -> str:
    """A remedy for a word that is none of ``known``: the one that was likely meant, or all of them."""
    names = list(known)
    near = difflib.get_close_matches(word[:80].lower(), names, 1)
    return f"did you mean {near[0]}?" if near else f"choose one of {', '.join(names)}"


class TracekitError(Exception):
    """Something the user can put right.

    ``str(error)`` is one line: what is wrong, with the file's name where there is one, then what to do about it.
    """

    exit_code = 2

    def __init__(self, problem: str, remedy: str = "") -> None:
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"{problem}; {remedy}" if remedy else problem)


class InputError(TracekitError):
    """A file or folder that cannot be used."""


class UsageError(TracekitError):
    """An option whose value makes no sense for this job."""


class PartialInputError(TracekitError):
    """Some of the input was not readable and ``--strict`` was asked for."""

    exit_code = 3
