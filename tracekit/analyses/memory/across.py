"""Sentences about memory across ranks and over steps: who holds more than its peers, on whose device, and what grows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from tracekit.analyses import _thresholds as thresholds
from tracekit.analyses.memory.rows import RankMemory, main_devices
from tracekit.findings import Finding, Severity
from tracekit.memory.growth import Growing
from tracekit.units import format_bytes, listed, plural
from tracekit.vocabulary import CATEGORIES

_EVIDENCE = "peaks of every rank"
#: Smaller than a CUDA context's own allocations: nobody looks for it.
_LEAST_FOREIGN = 1 << 20
_ADVICE = {
    "activations": "Balance layers, micro-batches in flight or tokens between the ranks.",
    "parameters": "Balance layers and embeddings between the ranks.",
    "optimizer_state": "Balance layers and embeddings between the ranks.",
    "before_recording": "Record from the construction of the model on to see what it is.",
}


def spread(ranks: Sequence[RankMemory]) -> Iterator[Finding]:
    """The rank that holds more than its peers, of what, and by which owners."""
    if len(ranks) < 2:
        return
    high = max(ranks, key=lambda row: row.memory.peak or 0)
    low = min(ranks, key=lambda row: row.memory.peak or 0)
    top, bottom = high.memory.peak or 0, low.memory.peak or 0
    severity = thresholds.PEAK_SPREAD.of((top - bottom) / top if top else 0.0)
    if severity is None:
        return
    gaps = {name: high.memory.categories.get(name, 0) - low.memory.categories.get(name, 0) for name in CATEGORIES}
    name, gap = max(gaps.items(), key=lambda item: item[1])
    least = "at least " if high.memory.least or low.memory.least else ""
    text = (
        f"The peaks of the ranks differ: {least}{format_bytes(top)} on {high.label}, {format_bytes(bottom)} on {low.label}"
        f"{_above(high, ranks)}. Most of it is {name.replace('_', ' ')} ({format_bytes(gap)} more{_larger(high, low, name, gap)})."
    )
    advice = _ADVICE.get(name, "Look at the owners of both ranks at their peaks.")
    yield Finding("memory.imbalance", severity, text, (top - bottom) / top, "ratio of peak", _EVIDENCE, advice, row=high.place)


def _above(high: RankMemory, ranks: Sequence[RankMemory]) -> str:
    """Where one rank alone stands above all others: by how much."""
    others = [row.memory.peak or 0 for row in ranks if row is not high]
    middle = int(median(others))
    if len(others) < 2 or not middle or max(others) > 1.02 * middle:
        return ""
    more = (high.memory.peak or 0) - middle
    return f": rank {high.rank} peaks {_size(more)}, {more / middle:.0%}, above all others"


def _larger(high: RankMemory, low: RankMemory, category: str, gap: int) -> str:
    """The owner that makes most of the difference, where one does."""
    amounts: dict[str, int] = {}
    for row, sign in ((high, 1), (low, -1)):
        for holding in row.memory.holdings:
            if holding.category == category:
                name = holding.unit or holding.name
                amounts[name] = amounts.get(name, 0) + sign * holding.bytes
    name, amount = max(amounts.items(), key=lambda item: item[1], default=("", 0))
    return f", mostly {name}" if name and 2 * amount > gap else ""


def foreign(rows: Sequence[RankMemory], hosts: dict[int, str]) -> Iterator[Finding]:
    """Ranks that hold memory on the device of another rank. ``hosts``: host of each rank, '' where not known."""
    home = {row.rank: row.memory.device for row in main_devices(rows)}
    for row in rows:
        device, held = row.memory.device, row.memory.peak if row.memory.peak is not None else row.memory.end
        mine = home.get(row.rank, "")
        if not _is_other(device, mine) or (held or 0) < _LEAST_FOREIGN:
            continue
        owners = [r for r, other in home.items() if other == device and r != row.rank and hosts.get(r, "") == hosts.get(row.rank, "")]
        whose = f", the device of rank {listed(owners)}" if owners else ", beside its own"
        gpu = device.rpartition(":")[2]
        text = f"Rank {row.rank} holds {_size(held or 0)} on GPU {gpu} ({device}){whose}; its own is {mine}."
        advice = "Call torch.cuda.set_device(local_rank) before anything else uses CUDA, and load checkpoints with map_location."
        severity: Severity = "warning" if owners else "info"
        yield Finding("memory.foreign_device", severity, text, float(held or 0), "bytes", _EVIDENCE, advice, row=row.place)


def _is_other(device: str, mine: str) -> bool:
    return ":" in device and ":" in mine and device != mine and device.partition(":")[0] == mine.partition(":")[0]


def grows(rows: Sequence[RankMemory]) -> Iterator[Finding]:
    """The rank that grows most from step to step, and by what."""
    growing = [(row, sum(one.bytes_per_step for one in row.memory.growing)) for row in rows if row.memory.growing]
    if not growing:
        return
    row, amount = max(growing, key=lambda pair: pair[1])
    severity = thresholds.GROWTH.of(amount / row.memory.peak) if row.memory.peak else None
    if severity is None:
        return
    owners = "; ".join(f"{_owner(one)} ({format_bytes(one.bytes_per_step)})" for one in (row.memory.growing or [])[:3])
    also = f", and of {plural(len(growing) - 1, 'more rank or device', 'more ranks or devices')}" if len(growing) > 1 else ""
    text = f"Memory kept at the end of a step grows by {_size(amount)} each step on {row.label}{also}: {owners}."
    advice = (
        "Keep numbers instead of tensors (loss.item(), .detach()), and empty lists and caches that hold tensors of past steps; "
        "the line of code says who made them."
    )
    yield Finding(
        "memory.growth", severity, text, float(amount), "bytes per step", "memory at the ends of the steps", advice, row=row.place
    )


def _owner(one: Growing) -> str:
    place = one.stack[0] if one.stack else one.name or one.unit
    category = one.category.replace("_", " ")
    return f"{category} made at {place}" if place else f"{category}, made where no stack is recorded"


def _size(size: int) -> str:
    """``839 MB (800 MiB)``: jobs' own logs count in both."""
    scale, unit = (2**30, "GiB") if size >= 2**30 else (2**20, "MiB")
    return f"{format_bytes(size)} ({size / scale:.4g} {unit})" if size >= 2**20 else format_bytes(size)
