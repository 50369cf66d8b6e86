"""Kernels that a user calls communication, by patterns of their names: for libraries that no table knows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from tracekit.collectives.kinds import KernelClass
from tracekit.errors import UsageError
from tracekit.vocabulary import KINDS

_AXIS = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


@dataclass(frozen=True)
class NamedCommunication:
    """Kernels whose name holds ``pattern`` (a regular expression) are of ``kind`` along ``axis`` ('' where the process group tells it)."""

    pattern: str
    kind: str
    axis: str = ""


Named = tuple[NamedCommunication, ...]


def parse_communication(text: str) -> NamedCommunication:
    """``PATTERN=kind[:axis]``; UsageError, one line, for anything else."""
    pattern, separator, target = text.rpartition("=")
    if not separator or not pattern:
        raise UsageError(f"--communication {text!r} is not PATTERN=kind[:axis]", "for example 'my_exchange.*=all_to_all:ep'")
    return named(pattern, target)


def named(pattern: str, target: str) -> NamedCommunication:
    """From a pattern and ``kind[:axis]``; UsageError where one of them makes no sense."""
    kind, _, axis = target.partition(":")
    if kind not in KINDS:
        raise UsageError(f"communication {pattern!r}: there is no kind {kind!r}", f"kinds are {', '.join(KINDS)}")
    if axis and not _AXIS.fullmatch(axis):
        raise UsageError(f"communication {pattern!r}: {axis!r} is no name of an axis", "use letters, digits and _")
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError(f"communication {pattern!r} is no regular expression ({error})", "write a backslash before brackets") from error
    return NamedCommunication(pattern, kind, axis)


def from_table(table: Mapping[str, object]) -> Named:
    """The table ``[communication]`` of a configuration file: pattern -> ``kind[:axis]``."""
    return tuple(named(str(pattern), str(target)) for pattern, target in table.items())


@lru_cache(maxsize=65536)
def named_class(name: str, rules: Named) -> tuple[KernelClass, str] | None:
    """(what the first rule that fits says of a kernel of this name, its axis); None where none fits."""
    for rule in rules:
        if re.search(rule.pattern, name) is not None:
            return KernelClass(rule.kind, "named"), rule.axis
    return None


def merged(*several: Sequence[NamedCommunication]) -> Named:
    """All rules, those given first first."""
    return tuple(rule for rules in several for rule in rules)
