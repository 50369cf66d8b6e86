"""Tables of experiments; those of a training step: bytes at the peak, bytes at every moment, collectives in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from tracekit.collectives.semantics import sent_bytes
from tracekit.findings import Table
from tracekit.simulate.experiment import CELL_KINDS, Call, Cell, Moment
from tracekit.simulate.holdings import bytes_by_kind, peak

#: Key in the JSON -> (heading with its unit, the value of each row): everything that is to be said of a column, once.
Columns = Mapping[str, tuple[str, Sequence[object]]]


def table(title: str, columns: Columns, note: str = "", shown: int | None = None, missing: Mapping[str, str] | None = None) -> Table:
    """A table from its columns. ``shown`` rows are printed in a terminal: all without, 0 leaves the table to the report."""
    frame = pd.DataFrame({name: list(values) for name, (_, values) in columns.items()})
    headings = {name: heading for name, (heading, _) in columns.items()}
    return Table(title, frame, headings, note, preview=len(frame) if shown is None else shown, missing=missing or {})


def peak_table(moments: Mapping[str, Sequence[Moment]]) -> Table:
    """One row a variant: bytes of each kind on the rank and at the moment with most, and their sum. ``moments`` by the variant's name."""
    peaks = [(seen[index], rank) for seen in moments.values() for index, rank in [peak(seen)]]
    columns: Columns = {
        "variant": ("Variant", list(moments)),
        "rank": ("Rank", [rank for _, rank in peaks]),
        "moment": ("Moment", [moment.title for moment, _ in peaks]),
    }
    return table("Peak, and by what", {**columns, **_of_kinds([moment.holds[rank] for moment, rank in peaks])})


def live_table(name: str, moments: Sequence[Moment], printed: bool) -> Table:
    """One row a moment: bytes of each kind on the rank with the peak, and their sum."""
    _, rank = peak(moments)
    columns = {"moment": ("Moment", [moment.title for moment in moments]), **_of_kinds([moment.holds[rank] for moment in moments])}
    return table(f"{name}: bytes held by rank {rank} at each moment", columns, shown=None if printed else 0)


def _of_kinds(held: Sequence[Sequence[Cell]]) -> Columns:
    """A column of bytes for each kind that occurs, and one for their sum."""
    by_kind = [bytes_by_kind(cells) for cells in held]
    kinds = [kind for kind in CELL_KINDS if any(kind in found for found in by_kind)]
    columns = {kind: (f"{kind.replace('_', ' ').capitalize()} [B]", [found.get(kind, 0) for found in by_kind]) for kind in kinds}
    return columns | {"sum": ("Sum [B]", [sum(found.values()) for found in by_kind])}


def collectives_table(calls: Mapping[str, Sequence[Call]], world: int, replicas: int = 1) -> Table:
    """One row a collective of rank 0, in order. ``calls`` by the variant's name; those of a single one are printed as calls already.

    ``world``: ranks of every group but those between replicas, which have ``replicas``.
    """
    found = [(name, number, call) for name, made in calls.items() for number, call in enumerate(made, 1)]
    made = [call for _, _, call in found]
    sizes = np.array([replicas if replicas > 1 and call.axis == "dp_replicate" else world for call in made], np.int64)
    full = np.array([call.full_bytes for call in made], np.int64)
    columns: Columns = {
        "variant": ("Variant", [name for name, _, _ in found]),
        "number": ("No.", [number for _, number, _ in found]),
        "phase": ("Phase", [call.phase for call in made]),
        "kind": ("Collective", [call.kind for call in made]),
        "purpose": ("For", [call.purpose for call in made]),
        "unit": ("Unit", [call.label for call in made]),
        "full_bytes": ("Full tensor, with padding [B]", full.tolist()),
        "sent_bytes": ("Most sent by a rank [B]", sent_bytes(pd.Series([call.kind for call in made], dtype="str"), full, sizes).tolist()),
    }
    return table("Collectives of a step", columns, shown=None if len(calls) > 1 else 0)
