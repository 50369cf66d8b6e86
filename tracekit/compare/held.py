"""Who owns what at the end of the snapshots of a rank, and what of it is new, gone, larger and smaller on the other side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tracekit.memory.compared import OwnerChange, amounts, owner_changes
from tracekit.units import format_bytes

#: Owners of one device that are listed, the largest changes first.
MOST_OWNERS = 50


class Held(msgspec.Struct, frozen=True):
    """What one device of a rank holds at the end of its snapshot: (category, unit, name, bytes) of every owner."""

    rank: int
    device: str
    owners: list[tuple[str, str, str, int]]


@dataclass(frozen=True)
class OwnerMoved:
    """An owner of memory on one device of one rank whose bytes differ between the sides."""

    rank: int
    device: str
    change: OwnerChange

    @property
    def owner(self) -> str:
        """``train.py:7 log (activations)``."""
        change = self.change
        category = change.category.replace("_", " ")
        name = " ".join(part for part in (change.unit, change.name) if part)
        return f"{name} ({category})" if name else category

    @property
    def sizes(self) -> str:
        """``1.2 GB -> 1.5 GB (+300 MB)``."""
        before, after = self.change.before, self.change.after
        difference = f"{'+' if after > before else '-'}{format_bytes(abs(after - before))}"
        return f"{format_bytes(before)} -> {format_bytes(after)} ({difference})"


def held_in(document: Mapping[str, Any]) -> list[Held]:
    """What each device held, from the JSON of ``analyze``; devices whose owners at the end are not known are left out."""
    found = []
    for row in document.get("memory") or []:
        owners = row.get("end_owners")
        if row["rank"] is not None and owners:
            rows = [(str(o["category"]), str(o["unit"] or ""), str(o["name"] or ""), int(o["bytes"])) for o in owners]
            found.append(Held(int(row["rank"]), str(row["device"] or ""), rows))
    return found


def owners_moved(base: Sequence[Held], new: Sequence[Held]) -> list[OwnerMoved]:
    """Owners whose bytes differ on devices that both sides have a snapshot of, the largest change first."""
    before, after = ({(held.rank, held.device): held.owners for held in side} for side in (base, new))
    moved = [
        OwnerMoved(*device, change)
        for device in before
        if device in after
        for change in owner_changes(amounts(before[device]), amounts(after[device]))[:MOST_OWNERS]
    ]
    return sorted(moved, key=lambda one: (-abs(one.change.after - one.change.before), one.rank, one.device, one.owner))
