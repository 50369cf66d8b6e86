"""Sentences about the allocator: requests that did not fit, and memory that is reserved but not used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tracekit.analyses import _thresholds as thresholds
from tracekit.analyses.memory.rows import RankMemory
from tracekit.findings import Finding
from tracekit.memory.fragmentation import Fragmentation
from tracekit.memory.oom import OutOfMemory
from tracekit.memory.pins import Pin
from tracekit.units import capitalized, format_bytes, plural

_ADVICE = "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, and keep shapes the same from step to step."


def failures(rows: Sequence[RankMemory]) -> Iterator[Finding]:
    """Requests that failed, and those that only fitted after segments were given back."""
    for row in rows:
        if row.memory.failures:
            text, last = _request(row, "ran out of memory", row.memory.failures)
            advice = last.remedy()
            size = float(last.requested)
            yield Finding("memory.out_of_memory", "critical", f"{text}.", size, "bytes", "memory history", advice, row=row.place)
        if row.memory.retries:
            text, last = _request(row, "had to give cached memory back before a request fitted", row.memory.retries)
            text += f"; {format_bytes(last.given_back)} in {plural(last.segments, 'segment')} were given back."
            advice = f"{last.remedy()} Giving back stops the device."
            size = float(last.requested)
            yield Finding("memory.allocation_retries", "warning", text, size, "bytes", "memory history", advice, row=row.place)


def _request(row: RankMemory, what: str, found: Sequence[OutOfMemory]) -> tuple[str, OutOfMemory]:
    again = f" ({len(found)} times in all)" if len(found) > 1 else ""
    return f"{capitalized(row.label)} {what}{again}: {found[-1].reason()}", found[-1]


def fragmentation(rows: Sequence[RankMemory]) -> Iterator[Finding]:
    """The rank of which most is unused, at its peak or where most was reserved."""
    found = [(row, f"the peak of {row.label}", row.memory.fragmentation) for row in rows if row.memory.fragmentation is not None]
    found += [
        (row, f"the moment at which {row.label} reserved most", row.memory.most_reserved.fragmentation)
        for row in rows
        if row.memory.most_reserved is not None
    ]
    if not found:
        return
    row, when, worst = max(found, key=lambda one: one[2].share)
    severity = thresholds.FRAGMENTATION.of(worst.share)
    if severity is None:
        return
    text = (
        f"At {when}, {worst.share:.0%} of reserved memory is not in use: {format_bytes(worst.unused)} of "
        f"{format_bytes(worst.reserved)}{_pieces(worst)}.{_pinned(row)}"
    )
    yield Finding(
        "memory.fragmentation", severity, text, worst.share, "ratio of reserved", "allocated and reserved memory", _ADVICE, row=row.place
    )


def _pieces(worst: Fragmentation) -> str:
    if worst.largest < 0:
        return ""
    return f" in {plural(worst.pieces, 'piece')}, the largest of {format_bytes(worst.largest)}"


def _pinned(row: RankMemory) -> str:
    """Where unused memory lies at the moment at which most was reserved, and who keeps half-empty segments."""
    if row.memory.most_reserved is None:
        return ""
    unused, text = row.memory.most_reserved.unused, ""
    if unused.empty_segments:
        text = f" {format_bytes(unused.empty_bytes)} of it lie in {plural(unused.empty_segments, 'segment')} without any block."
    if unused.pins:
        text += f" Half-empty segments are kept by {', '.join(_pin(pin) for pin in unused.pins[:3])}."
    return text


def _pin(pin: Pin) -> str:
    name = pin.name or pin.category.replace("_", " ")
    kept = f", which keep {format_bytes(pin.free)} free beside them" if pin.free else ""
    return f"{name} ({format_bytes(pin.bytes)} in {plural(pin.segments, 'segment')}{kept})"
