"""Two snapshots of one rank: what is new, gone, larger and smaller, by owner, where they end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

#: (category, unit, name) of an owner -> bytes.
Amounts = Mapping[tuple[str, str, str], int]


@dataclass(frozen=True)
class OwnerChange:
    """Bytes of one owner, before and after; ``unit`` and ``name`` are '' where not known."""

    category: str
    unit: str
    name: str
    before: int
    after: int

    @property
    def kind(self) -> Literal["new", "gone", "larger", "smaller"]:
        """What happened to the owner."""
        if not self.before:
            return "new"
        if not self.after:
            return "gone"
        return "larger" if self.after > self.before else "smaller"


def owner_changes(before: Amounts, after: Amounts) -> list[OwnerChange]:
    """Owners whose bytes differ, the largest change first. Their differences add up to that of the sums."""
    changes = [OwnerChange(*owner, before.get(owner, 0), after.get(owner, 0)) for owner in {**before, **after}]
    return sorted((c for c in changes if c.before != c.after), key=lambda c: (-abs(c.after - c.before), c.category, c.name))


def amounts(owners: Iterable[tuple[str, str, str, int]]) -> dict[tuple[str, str, str], int]:
    """Bytes of each owner out of (category, unit, name, bytes)."""
    found: dict[tuple[str, str, str], int] = {}
    for category, unit, name, size in owners:
        found[category, unit, name] = found.get((category, unit, name), 0) + size
    return found
