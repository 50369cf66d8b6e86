"""Tables of one training step that every sharding experiment has: bytes at the peak, bytes at every moment, collectives in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from tracekit.collectives.semantics import sent_bytes
from tracekit.findings import Table
from tracekit.simulate.experiment import CELL_KINDS, Call, Moment
from tracekit.simulate.holdings import bytes_by_kind, peak


def table(title: str, rows: Sequence[Mapping[str, object]], headings: Mapping[str, str], note: str = "", printed: bool = True) -> Table:
    """A table of ``rows`` with the columns of ``headings``, printed whole or left to the report."""
    frame = pd.DataFrame(list(rows), columns=list(headings))
    return Table(title, frame, headings, note, preview=len(rows) if printed else 0)


def peak_table(moments: Mapping[str, Sequence[Moment]]) -> Table:
    """One row a variant: bytes of each kind on the rank and at the moment with most, and their sum. ``moments`` by the variant's name."""
    places = {name: (seen[index], rank) for name, seen in moments.items() for index, rank in [peak(seen)]}
    held = {name: bytes_by_kind(moment.holds[rank]) for name, (moment, rank) in places.items()}
    kinds = [kind for kind in CELL_KINDS if any(kind in found for found in held.values())]
    rows = [
        {"variant": name, "rank": rank, "moment": moment.title}
        | {kind: held[name].get(kind, 0) for kind in kinds}
        | {"sum": moment.live_bytes(rank)}
        for name, (moment, rank) in places.items()
    ]
    return table("Peak, and by what", rows, {"variant": "Variant", "rank": "Rank", "moment": "Moment"} | _of_kinds(kinds))


def live_table(name: str, moments: Sequence[Moment], printed: bool) -> Table:
    """One row a moment: bytes of each kind on the rank with the peak, and their sum."""
    _, rank = peak(moments)
    by_moment = [bytes_by_kind(moment.holds[rank]) for moment in moments]
    kinds = [kind for kind in CELL_KINDS if any(kind in held for held in by_moment)]
    rows = [
        {"moment": moment.title} | {kind: held.get(kind, 0) for kind in kinds} | {"sum": moment.live_bytes(rank)}
        for moment, held in zip(moments, by_moment, strict=True)
    ]
    title = f"{name}: bytes held by rank {rank} at each moment"
    return table(title, rows, {"moment": "Moment"} | _of_kinds(kinds), printed=printed)


def _of_kinds(kinds: Sequence[str]) -> dict[str, str]:
    """Headings of the kinds and their sum."""
    return {kind: f"{kind.replace('_', ' ').capitalize()} [B]" for kind in kinds} | {"sum": "Sum [B]"}


def collectives_table(calls: Mapping[str, Sequence[Call]], world: int, replicas: int = 1) -> Table:
    """One row a collective of rank 0, in order. ``calls`` by the variant's name; those of a single one are printed as calls already.

    ``world``: ranks of every group but those between replicas, which have ``replicas``.
    """
    found = [(name, number, call) for name, made in calls.items() for number, call in enumerate(made, 1)]
    sizes = np.array([replicas if replicas > 1 and call.axis == "dp_replicate" else world for _, _, call in found], np.int64)
    full = np.array([call.full_bytes for _, _, call in found], np.int64)
    sent = sent_bytes(pd.Series([call.kind for _, _, call in found], dtype="str"), full, sizes)
    rows = [
        {
            "variant": name,
            "number": number,
            "phase": call.phase,
            "kind": call.kind,
            "purpose": call.purpose,
            "unit": call.label,
            "full_bytes": call.full_bytes,
            "sent_bytes": int(size),
        }
        for (name, number, call), size in zip(found, sent, strict=True)
    ]
    headings = {
        "variant": "Variant",
        "number": "No.",
        "phase": "Phase",
        "kind": "Collective",
        "purpose": "For",
        "unit": "Unit",
        "full_bytes": "Full tensor, with padding [B]",
        "sent_bytes": "Most sent by a rank [B]",
    }
    return table("Collectives of a step", rows, headings, printed=len(calls) > 1)
