"""What arguments of an experiment have to be: refusals that several experiments share, each one line with its reason."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from tracekit.errors import UsageError

#: Elements in one array, and multiplications in one pass, beyond which an experiment no longer ends in seconds.
MOST_ELEMENTS, MOST_MULTIPLICATIONS = 10**7, 10**8
#: No number format has elements larger than this.
MOST_ELEMENT_BYTES = 16


def words(name: str) -> str:
    """A field's name as it is read: ``kv_heads`` -> ``kv heads``."""
    return name.replace("_", " ")


def at_least(least: int, arguments: object, *names: str) -> None:
    """Refuse whole numbers below ``least``."""
    for name in names:
        value = getattr(arguments, name)
        if value < least:
            raise UsageError(f"{words(name)} {value} makes no sense", f"give at least {least}")


def one_of(choices: Sequence[str], arguments: object, name: str) -> None:
    """Refuse a word that is none of the choices."""
    value = getattr(arguments, name)
    if value not in choices:
        raise UsageError(f"there is no {words(name)} {value!r}", f"choose one of {', '.join(choices)}")


def element_bytes(arguments: object) -> None:
    """Refuse elements of no bytes, or of more than any number has."""
    at_least(1, arguments, "element_bytes")
    value = getattr(arguments, "element_bytes")  # noqa: B009 - the field of whichever experiment asks
    if value > MOST_ELEMENT_BYTES:
        raise UsageError(f"elements of {value} bytes", f"give at most {MOST_ELEMENT_BYTES}; fp32 has 4, bf16 has 2")


def within(quantity: int | float, most: int, what: str, remedy: str) -> None:
    """Refuse what would take too long or too much memory."""
    if not math.isfinite(quantity) or quantity > most:
        raise UsageError(f"{quantity:.3g} {what} are more than the {most:.3g} of an experiment", remedy)


def options(arguments: Any, most: Mapping[str, int]) -> None:
    """Refuse numbers outside 1 to ``most``, a negative seed, and words that are none of their field's choices; all by option's name."""
    for name, limit in most.items():
        value = getattr(arguments, name)
        if not 1 <= value <= limit:
            raise UsageError(f"{_option(name)} {value}", f"give 1 to {limit}")
    if arguments.seed < 0:
        raise UsageError(f"--seed {arguments.seed}", "give 0 or more")
    for field in fields(arguments):
        value = getattr(arguments, field.name)
        if "choices" in field.metadata and value not in field.metadata["choices"]:
            raise UsageError(f"{_option(field.name)} {value}", f"choose one of {', '.join(map(str, field.metadata['choices']))}")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
