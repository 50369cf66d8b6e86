"""Two snapshots of one rank: what is new, gone, larger and smaller, by owner, where they end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tracekit.memory.peak import Holding
from tracekit.memory.summary import DeviceMemory


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


def owner_changes(before: DeviceMemory, after: DeviceMemory) -> list[OwnerChange]:
    """Owners whose bytes at the end differ, the largest change first. Their differences add up to that of what is allocated at the end."""
    old, new = _amounts(before.end_owners), _amounts(after.end_owners)
    changes = [OwnerChange(*owner, old.get(owner, 0), new.get(owner, 0)) for owner in {**old, **new}]
    return sorted((c for c in changes if c.before != c.after), key=lambda c: (-abs(c.after - c.before), c.category, c.name))


def _amounts(owners: Sequence[Holding]) -> dict[tuple[str, str, str], int]:
    amounts: dict[tuple[str, str, str], int] = {}
    for owner in owners:
        key = (owner.category, owner.unit, owner.name)
        amounts[key] = amounts.get(key, 0) + owner.bytes
    return amounts
