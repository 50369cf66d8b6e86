"""The figures of a run: every quantity that can be held against another run's, with a value a rank and step where it has one.

They are taken from the JSON of ``tracekit analyze`` (docs/json.md), so that a run that was just read, a saved ``--json`` file and a
baseline are one thing here. A quantity's ``key`` is stable; patterns of thresholds match it:

    step.time|compute|exposed_comm|hidden_comm|exposed_copy|idle     exposed.AXIS
    phase.PHASE.compute                                              kernels.FAMILY.time|calls
    operator.NAME[SHAPES].time|calls                                 collectives.AXIS.KIND.PURPOSE.calls|bytes|transfer|wait
    collectives.AXIS.KIND.PURPOSE.DTYPE.SIZE.calls                   memory.peak|reserved|CATEGORY, memory.unit.CATEGORY.NAME
    pipeline.bubble_share, mfu                                       coverage.ranks|incomplete_files
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from tracekit.compare.families import family
from tracekit.compare.held import Held, held_in

#: How a quantity is held against another run's: equal; within a share; beyond noise; shown only.
Rule = Literal["exact", "peak", "time", "detail"]
#: What a value belongs to.
Scope = Literal["step", "rank", "job"]
#: Groups of quantities that are measured together or not at all: the first word of a key, as a reader calls it.
FAMILIES = {
    "step": "the time of a step",
    "exposed": "exposed communication by axis",
    "phase": "compute by phase",
    "kernels": "kernels and operators",
    "operator": "kernels and operators",
    "collectives": "collectives",
    "memory": "memory",
    "pipeline": "the pipeline",
    "mfu": "MFU",
    "coverage": "coverage",
}
#: What a rank keeps between steps: equal from run to run to the byte.
PERSISTENT = ("parameters", "optimizer_state")
#: No step is marked: the whole window counts as one.
NO_STEP = -1
#: Largest classes that are kept one by one.
MOST_OPERATORS, MOST_CLASSES, MOST_UNITS = 60, 120, 40


class Quantity(msgspec.Struct, frozen=True):
    """``values`` has an entry a place of its scope: ``Run.steps``, ``Run.ranks``, or one for the job. None: not measured there."""

    key: str
    label: str
    unit: str
    rule: Rule
    scope: Scope
    values: list[float | None]
    higher_is_better: bool = False


class Run(msgspec.Struct, frozen=True):
    """One recording. ``steps`` are (rank, step number or NO_STEP), ``axes`` the mesh as (name, size), ``roles`` rank -> coordinates.

    ``at_least``: ranks whose peak memory is a lower bound. ``held``: who owns what at the end of snapshots.
    """

    name: str
    world_size: int | None
    device: str
    axes: list[tuple[str, int]]
    ranks: list[int]
    steps: list[tuple[int, int]]
    quantities: list[Quantity]
    not_measured: dict[str, str]
    roles: dict[str, list[int]] = {}
    version: str = ""
    at_least: list[int] = []
    held: list[Held] = []

    def by_key(self) -> dict[str, Quantity]:
        """The quantities by their keys."""
        return {quantity.key: quantity for quantity in self.quantities}

    def places(self, scope: Scope) -> list[tuple[int, int]]:
        """(rank, step) of each entry of a quantity's values."""
        if scope == "step":
            return self.steps
        return [(rank, NO_STEP) for rank in self.ranks] if scope == "rank" else [(NO_STEP, NO_STEP)]


def of_document(document: Mapping[str, Any], name: str) -> Run:
    """The figures of one run from the JSON of ``analyze``.

    Raises KeyError, TypeError, ValueError or AttributeError for a document that is not what docs/json.md says; the reader of files turns
    that into one line.
    """
    job = document["job"]
    places = _places(document)
    ranks = sorted({rank for rank, _ in places} | {row["rank"] for row in document.get("memory") or [] if row["rank"] is not None})
    builder = _Builder(places, ranks)
    missing: dict[str, str] = {}
    for word, add in _PARTS.items():
        if not add(builder, document):
            missing[word] = _reason(document, word)
    axes = [(str(axis["name"]), int(axis["size"])) for axis in job["mesh"]["axes"]]
    roles = {str(rank): [int(at) for at in place] for rank, place in job["mesh"].get("coordinates", {}).items()}
    return Run(
        name=name,
        world_size=job["world_size"],
        device=str(job["device"] or ""),
        axes=axes,
        ranks=ranks,
        steps=places,
        quantities=builder.quantities,
        not_measured=missing,
        roles=roles,
        version=str(document.get("tracekit_version", "")),
        at_least=sorted({int(row["rank"]) for row in _devices(document) if row.get("lower_bound")}),
        held=held_in(document),
    )


def _number(step: Any) -> int:
    return NO_STEP if step is None else int(step)


def _places(document: Mapping[str, Any]) -> list[tuple[int, int]]:
    rows = [*(document.get("breakdown") or []), *((document.get("step_classes") or {}).get("steps") or [])]
    return sorted({(int(row["rank"]), _number(row["step"])) for row in rows if row["rank"] is not None})


_KEYS = {
    "step": "breakdown",
    "exposed": "exposed_by_axis",
    "kernels": "step_classes",
    "phase": "step_classes",
    "collectives": "step_classes",
}


def _reason(document: Mapping[str, Any], word: str) -> str:
    given = document.get("not_measured") or {}
    reason = given.get(_KEYS.get(word, word)) or given.get("comparison" if word == "mfu" else "")
    return str(reason) if reason else "the recording does not hold it"


class _Builder:
    """Collects quantities over fixed places."""

    def __init__(self, places: Sequence[tuple[int, int]], ranks: Sequence[int]) -> None:
        self.quantities: list[Quantity] = []
        self._step = {place: index for index, place in enumerate(places)}
        self._rank = {rank: index for index, rank in enumerate(ranks)}

    def by_step(
        self, key: str, label: str, unit: str, rule: Rule, values: Iterable[tuple[int, Any, Any]], fill: float | None = None
    ) -> None:
        """Add (rank, step, value); places without one hold ``fill``. Of two values at one place the sum counts."""
        row: list[float | None] = [fill] * len(self._step)
        for rank, step, value in values:
            place = self._step.get((int(rank), _number(step)))
            if place is not None and value is not None:
                row[place] = (row[place] or 0) + value
        self._add(Quantity(key, label, unit, rule, "step", row))

    def by_rank(self, key: str, label: str, unit: str, rule: Rule, values: Mapping[int, Any]) -> None:
        """Add rank -> value."""
        row: list[float | None] = [None] * len(self._rank)
        for rank, value in values.items():
            row[self._rank[rank]] = value
        self._add(Quantity(key, label, unit, rule, "rank", row))

    def of_job(self, key: str, label: str, unit: str, rule: Rule, value: float | None, *, higher_is_better: bool = False) -> bool:
        """Add one value; False, and nothing, where it is None."""
        if value is None:
            return False
        self._add(Quantity(key, label, unit, rule, "job", [value], higher_is_better))
        return True

    def _add(self, quantity: Quantity) -> None:
        if any(value is not None for value in quantity.values):
            self.quantities.append(quantity)


_STEP_PARTS = {
    "step_us": ("time", "step", "time"),
    "compute_us": ("compute", "compute", "time"),
    "exposed_comm_us": ("exposed_comm", "exposed communication", "time"),
    "hidden_comm_us": ("hidden_comm", "hidden communication", "detail"),
    "memory_copy_us": ("exposed_copy", "exposed copies", "detail"),
    "idle_us": ("idle", "idle", "detail"),
    "unknown_us": ("unknown", "not recorded", "detail"),
}


def _step(builder: _Builder, document: Mapping[str, Any]) -> bool:
    rows = document.get("breakdown") or []
    for column, (word, label, rule) in _STEP_PARTS.items():
        values = [(row["rank"], row["step"], row.get(column)) for row in rows]
        builder.by_step(f"step.{word}", label, "us", rule, values)  # type: ignore[arg-type]
    return bool(rows)


def _exposed(builder: _Builder, document: Mapping[str, Any]) -> bool:
    rows = document.get("exposed_by_axis") or []
    for axis in dict.fromkeys(str(row["axis"]) for row in rows):
        values = [(row["rank"], row["step"], row["exposed_us"]) for row in rows if row["axis"] == axis]
        builder.by_step(f"exposed.{axis}", f"exposed communication of {axis}", "us", "time", values)
    return document.get("exposed_by_axis") is not None


def _classes(document: Mapping[str, Any], name: str) -> tuple[list[tuple[int, Any]], list[Mapping[str, Any]]]:
    """((rank, step) of each value, rows) of one table of ``step_classes``."""
    found = document.get("step_classes") or {}
    return [(row["rank"], row["step"]) for row in found.get("steps") or []], list(found.get(name) or [])


def _placed(steps: Sequence[tuple[int, Any]], values: Sequence[Any]) -> list[tuple[int, Any, Any]]:
    return [(rank, step, value) for (rank, step), value in zip(steps, values, strict=True)]


def _phase(builder: _Builder, document: Mapping[str, Any]) -> bool:
    steps, rows = _classes(document, "phases")
    for row in rows:
        builder.by_step(f"phase.{row['phase']}.compute", f"compute of {row['phase']}", "us", "time", _placed(steps, row["time_us"]))
    return bool(rows)


def _kernels(builder: _Builder, document: Mapping[str, Any]) -> bool:
    steps, rows = _classes(document, "compute")
    families: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        families.setdefault(family(row["operator"], row["kernels"], row["work"]), []).append(row)
    for name, members in families.items():
        time = [value for row in members for value in _placed(steps, row["time_us"])]
        calls = [value for row in members for value in _placed(steps, row["calls"])]
        builder.by_step(f"kernels.{name}.time", f"{name} kernels", "us", "time", time, fill=0)
        builder.by_step(f"kernels.{name}.calls", f"calls of {name} kernels", "calls", "detail", calls, fill=0)
    for row in rows[:MOST_OPERATORS]:
        name = f"{row['operator']}{row['shapes']}"
        label = f"{family(row['operator'], row['kernels'], row['work'])}: {name}"
        builder.by_step(f"operator.{name}.time", label, "us", "detail", _placed(steps, row["time_us"]), fill=0)
        builder.by_step(f"operator.{name}.calls", f"calls of {name}", "calls", "detail", _placed(steps, row["calls"]), fill=0)
    return bool(rows)


def _collectives(builder: _Builder, document: Mapping[str, Any]) -> bool:
    steps, rows = _classes(document, "collectives")
    classes: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        classes.setdefault((str(row["axis"]), str(row["kind"]), str(row["purpose"])), []).append(row)
    for (axis, kind, purpose), members in classes.items():
        key, label = f"collectives.{axis}.{kind}.{purpose}", f"{kind} of {axis}" + (f" ({purpose})" if purpose != "unknown" else "")
        sums = {name: [value for row in members for value in _placed(steps, row[name])] for name in ("calls", "transfer_us", "wait_us")}
        builder.by_step(f"{key}.calls", f"calls: {label}", "calls", "exact", sums["calls"], fill=0)
        if all(row["full_bytes"] is not None for row in members):
            sizes = [(rank, step, n * row["full_bytes"]) for row in members for rank, step, n in _placed(steps, row["calls"])]
            builder.by_step(f"{key}.bytes", f"bytes: {label}", "bytes", "exact", sizes, fill=0)
        builder.by_step(f"{key}.transfer", f"transfer: {label}", "us", "time", sums["transfer_us"], fill=0)
        builder.by_step(f"{key}.wait", f"waiting: {label}", "us", "detail", sums["wait_us"], fill=0)
    for row in rows[:MOST_CLASSES]:
        size = "unknown size" if row["full_bytes"] is None else f"{row['full_bytes']:,} bytes"
        dtype = row["dtype"] or "unknown type"
        key = f"collectives.{row['axis']}.{row['kind']}.{row['purpose']}.{dtype}.{row['full_bytes']}.calls"
        label = f"calls: {row['kind']} of {row['axis']}, {dtype}, {size}"
        builder.by_step(key, label, "calls", "detail", _placed(steps, row["calls"]), fill=0)
    return document.get("step_classes") is not None


def _memory(builder: _Builder, document: Mapping[str, Any]) -> bool:
    rows = _devices(document)
    if not rows:
        return False
    peaks = _summed((row["rank"], row["peak_bytes"]) for row in rows)
    builder.by_rank("memory.peak", "peak memory", "bytes", "peak", peaks)
    builder.by_rank("memory.reserved", "reserved memory", "bytes", "peak", _summed((r["rank"], r.get("reserved_peak_bytes")) for r in rows))
    names = dict.fromkeys(name for row in rows for name in row["categories"] or {})
    for name in names:
        rule: Rule = "exact" if name in PERSISTENT else "detail"
        values = _summed((row["rank"], (row["categories"] or {}).get(name)) for row in rows)
        builder.by_rank(f"memory.{name}", name.replace("_", " "), "bytes", rule, values)
    units: dict[tuple[str, str], list[tuple[int, Any]]] = {}
    for row in rows:
        for unit in row.get("units") or []:
            if unit["name"] is None:
                continue  # the rest of its category, which is a figure of its own
            units.setdefault((str(unit["category"]), str(unit["name"])), []).append((row["rank"], unit["bytes"]))
    for (category, name), held in sorted(units.items(), key=lambda item: -max(v or 0 for _, v in item[1]))[:MOST_UNITS]:
        label = f"{category.replace('_', ' ')} of {name}"
        builder.by_rank(f"memory.unit.{category}.{name}", label, "bytes", "detail", _summed(held))
    return any(value is not None for value in peaks.values())


def _devices(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The entries of accelerators; those of the host only where there is no other."""
    rows = [row for row in document.get("memory") or [] if row["rank"] is not None]
    device = [row for row in rows if row["device"] and not str(row["device"]).startswith("cpu")]
    return device or rows


def _summed(values: Iterable[tuple[int, Any]]) -> dict[int, Any]:
    """rank -> sum of its known values; None where none is known."""
    result: dict[int, Any] = {}
    for rank, value in values:
        known = result.get(rank)
        result[rank] = known if value is None else value + (known or 0)
    return result


def _pipeline(builder: _Builder, document: Mapping[str, Any]) -> bool:
    """The bubble a rank and step where runs of the schedule are listed, else the job's share."""
    found = document.get("pipeline") or {}
    label = "pipeline bubble"
    runs: dict[tuple[int, Any], tuple[float, float]] = {}
    for row in found.get("by_rank") or []:
        if row["bubble_us"] is None or row["run_us"] is None:
            continue
        bubble, whole = runs.get((row["rank"], row["step"]), (0.0, 0.0))
        runs[row["rank"], row["step"]] = (bubble + row["bubble_us"], whole + row["run_us"])
    values = [(rank, step, bubble / whole) for (rank, step), (bubble, whole) in runs.items() if whole > 0]
    if values:
        builder.by_step("pipeline.bubble_share", label, "share", "time", values)
        return True
    return builder.of_job("pipeline.bubble_share", label, "share", "time", (found.get("bubble_share") or {}).get("measured"))


def _mfu(builder: _Builder, document: Mapping[str, Any]) -> bool:
    rows = [row for row in document.get("comparison") or [] if row["quantity"] == "step.mfu" and row["rank"] is None]
    return builder.of_job("mfu", "MFU", "share", "time", rows[0]["measured"] if rows else None, higher_is_better=True)


def _coverage(builder: _Builder, document: Mapping[str, Any]) -> bool:
    job, files = document["job"], document.get("coverage") or []
    bad = sum(entry["status"] not in ("complete", "repaired") for entry in files)
    builder.of_job("coverage.ranks", "ranks read", "ranks", "exact", len(job["ranks"]), higher_is_better=True)
    return builder.of_job("coverage.incomplete_files", "files not read whole", "files", "exact", bad)


_PARTS = {
    "step": _step,
    "exposed": _exposed,
    "phase": _phase,
    "kernels": _kernels,
    "collectives": _collectives,
    "memory": _memory,
    "pipeline": _pipeline,
    "mfu": _mfu,
    "coverage": _coverage,
}
