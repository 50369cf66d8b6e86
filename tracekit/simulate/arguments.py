"""What an experiment can be told: a field with its help, choices and bounds a line, and the refusals that follow from them.

    class Arguments:
        world: int = option(4, "Ranks of the group.", most=32)

The command line makes its options from the same fields.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field, fields
from typing import Any, TypeVar

from tracekit.errors import UsageError

T = TypeVar("T")
#: Elements in one array, and multiplications in one pass, beyond which an experiment no longer ends in seconds.
MOST_ELEMENTS, MOST_MULTIPLICATIONS = 10**7, 10**8
#: No number format has elements larger than this.
MOST_ELEMENT_BYTES = 16


def option(default: T, words: str, choices: Sequence[object] = (), least: float | None = None, most: float | None = None) -> T:
    """A field of ``Arguments``. ``most`` alone means 1 to ``most``."""
    low = 1 if least is None and most is not None else least
    return field(default=default, metadata={"help": words, "choices": tuple(choices), "least": low, "most": most})


def seed_of(what: str) -> int:
    """The field of a seed."""
    return option(0, f"Seed of {what}.", least=0)


def bytes_of_element(words: str = "held or under way", default: int = 2) -> int:
    """The field of an element's size."""
    return option(default, f"Bytes of one element {words}.".replace(" .", "."), most=MOST_ELEMENT_BYTES)


def spelled(name: str) -> str:
    """A field's name as the option that it is: ``kv_heads`` -> ``--kv-heads``."""
    return f"--{name.replace('_', '-')}"


def values(arguments: Any) -> list[tuple[str, object]]:
    """(name, value) of every argument, as an ``Experiment`` keeps them."""
    return [(each.name, getattr(arguments, each.name)) for each in fields(arguments)]


def check(arguments: Any) -> None:
    """Refuse numbers outside their bounds, then words that are none of their choices, each by its option's name."""
    for each in fields(arguments):
        value, least, most = getattr(arguments, each.name), each.metadata["least"], each.metadata["most"]
        if least is not None and not least <= value <= (math.inf if most is None else most):
            raise UsageError(f"{spelled(each.name)} {value}", f"give {least} or more" if most is None else f"give {least} to {most}")
    for each in fields(arguments):
        value, choices = getattr(arguments, each.name), each.metadata["choices"]
        if choices and value not in choices:
            raise UsageError(f"{spelled(each.name)} {value}", f"choose one of {', '.join(map(str, choices))}")


def within(quantity: int | float, most: int, what: str, remedy: str) -> None:
    """Refuse what would take too long or too much memory."""
    if not math.isfinite(quantity) or quantity > most:
        raise UsageError(f"{quantity:.3g} {what} are more than the {most:.3g} of an experiment", remedy)
