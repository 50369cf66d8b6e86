"""A hang in words."""

from __future__ import annotations

from collections.abc import Sequence

from tracekit.analyses.hang.gather import Call, Evidence
from tracekit.analyses.hang.roots import Root, idle_by_stack
from tracekit.analyses.hang.waits import Wait
from tracekit.units import capitalized

_MOST_RANGES = 8


def sentence(evidence: Evidence | None, root: Root) -> str:
    """``Ranks 0, 1, 3 wait in all_reduce seq 5 of dp (train.py:31) for rank 2, which is in sleep, at data.py:8.``"""
    who = ranks_text(root.ranks)
    text = f"{who} {root.doing}"
    wait = root.wait
    if wait is None:
        others = idle_by_stack(evidence, root.ranks) if evidence is not None else []
        text += "".join(f"; {_wait_in(ranks)} {place}" for place, ranks in others[:4])
        return _as_sentence(text)
    waiting = sorted({call.rank for call in wait.waiting} - set(root.ranks))
    if root.why in ("order", "stuck"):
        return _as_sentence(text)
    if root.why in ("mismatch", "skipped") or not waiting:
        return _as_sentence(f"{text}; {f'{_wait_in(waiting)} {call_text(wait)}' if waiting else f'{call_text(wait)} stands still'}")
    return _as_sentence(f"{_wait_in(waiting)} {call_text(wait)} for {who}, which {root.doing}")


def _wait_in(ranks: Sequence[int]) -> str:
    return f"{ranks_text(ranks)} wait{'s' if len(ranks) == 1 else ''} in"


def _as_sentence(text: str) -> str:
    return f"{capitalized(text)}."


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0-5, 7``."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranges(ranks)}"


def ranges(ranks: Sequence[int]) -> str:
    """``0-5, 7``; of many pieces the first, and how many ranks there are."""
    pieces: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if pieces and rank == pieces[-1][-1] + 1:
            pieces[-1] = [pieces[-1][0], rank]
        else:
            pieces.append([rank])
    shown = [str(piece[0]) if len(piece) == 1 else f"{piece[0]}{'-' if piece[-1] > piece[0] + 1 else ', '}{piece[-1]}" for piece in pieces]
    if len(shown) <= _MOST_RANGES:
        return ", ".join(shown)
    return f"{', '.join(shown[:_MOST_RANGES])}, ... ({len(set(ranks))} in all)"


def named(call: Call) -> str:
    """``all_reduce seq 5``; a message has no number."""
    return f"{call.kind} seq {call.seq}" if call.seq >= 0 else call.kind


def call_text(wait: Wait) -> str:
    """``all_reduce seq 5 of dp (train.py:31)``: the call in which a wait stands."""
    call = wait.waiting[0] if wait.waiting else wait.call
    return f"{named(call)} of {wait.group.label}" + (f" ({call.site})" if call.site else "")


def wait_text(wait: Wait) -> str:
    """``ranks 0, 1 in all_reduce seq 7 of tp, last completed 6, missing 2``."""
    parts = [f"{ranks_text(sorted(call.rank for call in wait.waiting))} in {call_text(wait)}" if wait.waiting else call_text(wait)]
    if wait.call.peer < 0 and wait.last_completed >= 0:
        parts.append(f"last completed {wait.last_completed}")
    for name, ranks in (("missing", wait.missing), (f"no {wait.left} of", wait.no_dump), ("different on", [c.rank for c in wait.differ])):
        if ranks:
            parts.append(f"{name} {ranges(ranks)}")
    return ", ".join(parts)
