"""Sentences about memory: what sets the peak, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from tracekit.analyses import _thresholds as thresholds
from tracekit.analyses.memory.across import foreign, grows, spread
from tracekit.analyses.memory.allocator import failures, fragmentation
from tracekit.analyses.memory.rows import RankMemory, main_devices
from tracekit.findings import Finding
from tracekit.units import capitalized, format_bytes, listed, plural

_EVIDENCE = "memory at the peak"
#: Operators and modules that hold logits or their gradient.
_LOGITS = re.compile(r"log_softmax|nll_loss|cross_entropy|logits", re.I)


def findings(rows: Sequence[RankMemory], units_of_job: int, reshards: bool | None, hosts: dict[int, str]) -> list[Finding]:
    """Every finding of the job.

    ``units_of_job``: sharded units, 0 unknown; ``reshards``: whether forward gives units back; ``hosts``: host of each rank.
    """
    ranks = main_devices(rows)
    found = [*failures(rows), *fragmentation(rows), *spread(ranks), *foreign(rows, hosts), *grows(rows)]
    if ranks:
        highest = max(ranks, key=lambda row: row.memory.peak or 0)
        found += [_peak(highest, len(ranks)), *_gathered(highest, units_of_job, reshards), *_buckets(ranks), *_logits(highest)]
        found += [*_unknown(highest), *_older(highest)]
    return found


def _peak(row: RankMemory, ranks: int) -> Finding:
    memory, peak = row.memory, row.memory.peak or 0
    shares = sorted(memory.categories.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{category_label(name)} {amount / peak:.0%}" for name, amount in shares[:3] if amount) if peak else ""
    when = [f"step {memory.peak_step}"] if memory.peak_step is not None else []
    when += [memory.peak_phase] if memory.peak_phase else []
    when += [f"at {memory.peak_unit}"] if memory.peak_unit else []
    least = "at least " if memory.least else ""
    place = f" in {', '.join(when)}" if when else ""
    most = "the most of all ranks" if ranks > 1 else "its most"
    text = f"{capitalized(row.label)} holds {least}{format_bytes(peak)}{place}, {most}" + (f": {parts}." if parts else ".")
    return Finding("memory.peak", "info", text, float(peak), "bytes", _EVIDENCE, row=row.place)


def _gathered(row: RankMemory, units_of_job: int, reshards: bool | None) -> Iterator[Finding]:
    """Full parameters at the peak beyond the largest unit: kept after forward, or gathered ahead."""
    amounts: dict[str, int] = {}
    for holding in row.memory.holdings:
        if holding.category == "gathered_parameters" and holding.unit:
            amounts[holding.unit] = amounts.get(holding.unit, 0) + holding.bytes
    extra = sum(amounts.values()) - max(amounts.values(), default=0)
    severity = thresholds.GATHERED_AHEAD.of(extra / row.memory.peak) if row.memory.peak else None
    if len(amounts) < 2 or severity is None:
        return
    kept = reshards is False or (units_of_job > 2 and len(amounts) >= units_of_job - 1)
    names = listed(sorted(amounts), 4)
    why = "units stay gathered after forward (reshard_after_forward=False)" if kept else "the next unit is gathered ahead (prefetch)"
    advice = (
        "Reshard after forward: it costs one more all-gather a unit and step."
        if kept
        else "Prefetch fewer units ahead, or wrap smaller units, where memory is short; it hides less communication."
    )
    text = (
        f"{plural(len(amounts), 'unit')} ({names}) hold full parameters at the peak of {row.label}: "
        f"{why} costs {format_bytes(extra)}, {extra / (row.memory.peak or 1):.0%} of the peak."
    )
    yield Finding("memory.gathered", severity, text, float(extra), "bytes", _EVIDENCE, advice, row=row.place)


def _buckets(ranks: Sequence[RankMemory]) -> Iterator[Finding]:
    amounts = {
        row.label: sum(h.bytes for h in row.memory.holdings if h.category == "communication_buffers" and h.name.startswith("bucket"))
        for row in ranks
    }
    label, amount = max(amounts.items(), key=lambda item: item[1])
    worst = next(row for row in ranks if row.label == label)
    peak = worst.memory.peak or 0
    severity = thresholds.BUCKETS.of(amount / peak) if peak else None
    if severity is not None:
        text = f"DDP's buckets hold every gradient a second time: {format_bytes(amount)} on {label}, {amount / peak:.0%} of its peak."
        advice = "Build DistributedDataParallel with gradient_as_bucket_view=True: gradients then live in the buckets."
        yield Finding("memory.ddp_buckets", severity, text, float(amount), "bytes", _EVIDENCE, advice, row=worst.place)


def _logits(row: RankMemory) -> Iterator[Finding]:
    amount = sum(holding.bytes for holding in row.memory.holdings if _LOGITS.search(holding.name))
    severity = thresholds.LOGITS.of(amount / row.memory.peak) if row.memory.peak else None
    if severity is not None and row.memory.peak:
        text = f"The loss holds {format_bytes(amount)} of logits at the peak of {row.label}, {amount / row.memory.peak:.0%} of it."
        advice = "Compute the loss in chunks of tokens, or with a fused kernel that keeps no logits, or shard the vocabulary."
        yield Finding("memory.logits", severity, text, float(amount), "bytes", _EVIDENCE, advice, row=row.place)


def _unknown(row: RankMemory) -> Iterator[Finding]:
    yield from _share(
        row,
        "unattributed",
        thresholds.UNATTRIBUTED,
        "Nothing says what {amount} at the peak of {label} ({share} of it) are",
        "Record with tracekit's recorder, which registers every storage, or with stacks.",
        _lines(row),
    )


def _lines(row: RankMemory) -> str:
    """Where most of the unattributed memory was allocated, as far as stacks tell."""
    named = [holding for holding in row.memory.holdings if holding.category == "unattributed" and holding.name]
    most = sorted(named, key=lambda holding: -holding.bytes)[:3]
    return f"; allocated at {', '.join(f'{one.name} ({format_bytes(one.bytes)})' for one in most)}." if most else "."


def _older(row: RankMemory) -> Iterator[Finding]:
    yield from _share(
        row,
        "before_recording",
        thresholds.OLDER_MEMORY,
        "{amount} at the peak of {label} ({share} of it) were allocated before recording began: their owners are not known",
        "Begin recording before the model is built, or use tracekit's recorder, which registers what stands already.",
    )


def _share(row: RankMemory, category: str, levels: thresholds.Levels, text: str, advice: str, more: str = ".") -> Iterator[Finding]:
    """A finding where a category has a large share of the peak; ``more`` is put behind ``text`` as it is (names of the program)."""
    amount, peak = row.memory.categories.get(category, 0), row.memory.peak or 0
    severity = levels.of(amount / peak) if peak else None
    if severity is not None:
        said = text.format(amount=format_bytes(amount), label=row.label, share=f"{amount / peak:.0%}") + more
        yield Finding(f"memory.{category}", severity, said, float(amount), "bytes", _EVIDENCE, advice, row=row.place)


def category_label(category: str) -> str:
    """``gathered parameters``."""
    return category.replace("_", " ")
