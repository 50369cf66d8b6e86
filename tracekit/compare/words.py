"""A comparison in sentences: first how much slower NEW is and why, then each cause in a phrase."""

from __future__ import annotations

import re

from tracekit.compare.causes import Cause
from tracekit.compare.changes import Change, Comparison
from tracekit.units import NS_PER_US, format_bytes, format_ns, listed


def headline(comparison: Comparison, found: list[Cause]) -> str:
    """``NEW is 4% slower (12.1 ms -> 12.6 ms a step): all_gather of dp_shard is no longer hidden (+3.1 ms).``"""
    first = _speed(comparison)
    worst = [cause for cause in found if _counts(cause)]
    if not worst:
        return f"{first}; nothing else changed by more than noise." if found == [] else f"{first}; no other figure that counts changed."
    said = phrase(worst[0])
    more = f", and {len(worst) - 1} more" if len(worst) > 1 else ""
    return f"{first}: {said}{more}."


def _counts(cause: Cause) -> bool:
    return cause.root.rule != "detail" or any(change.rule != "detail" for change in cause.consequences)


def _speed(comparison: Comparison) -> str:
    step = comparison.by_key().get("step.time")
    if step is None or step.outcome == "not_measured" or step.base is None or step.new is None:
        return "The time of a step was not measured on both sides"
    times = f"{format_ns(step.base * NS_PER_US)} -> {format_ns(step.new * NS_PER_US)} a step"
    relative = step.relative or 0.0
    if step.moved:
        return f"NEW is {abs(relative):.0%} {'slower' if relative > 0 else 'faster'} ({times})"
    if step.outcome == "noise":
        return f"NEW is as fast as BASE within their noise ({times}, {relative:+.0%})"
    return f"NEW is as fast as BASE ({times})"


def phrase(cause: Cause) -> str:
    """What changed, in the field's words, with its size."""
    root = cause.root
    worse = next((change for change in cause.consequences if change.outcome == "worse" and change.rule != "detail"), None)
    price = f"; {worse.label} {sizes(worse)}" if root.outcome == "better" and worse is not None else ""
    for pattern, say in _PHRASES:
        match = re.fullmatch(pattern, root.key)
        if match:
            return say(cause, *match.groups()) + price
    return f"{root.label} {sizes(root)}{price}"


def sizes(change: Change) -> str:
    """``250 us -> 275 us (+10%)``."""
    if change.base is None or change.new is None:
        return change.why or "not measured"
    share = "" if change.relative is None else f" ({_percent(change.relative)})"
    base, new = ("at least " if side in change.at_least else "" for side in ("BASE", "NEW"))
    return f"{base}{amount(change.base, change.unit)} -> {new}{amount(change.new, change.unit)}{share}"


def _percent(relative: float) -> str:
    return f"{relative:+.1%}" if abs(relative) < 0.0995 else f"{relative:+.0%}"


def amount(value: float, unit: str) -> str:
    """A value with its unit for a reader."""
    if unit == "us":
        return format_ns(value * NS_PER_US) if value else "0"
    if unit == "bytes":
        return format_bytes(value)
    if unit == "share":
        return f"{value:.1%}"
    shown = f"{value:,.0f}" if value == round(value) else f"{value:,.1f}"
    return f"{shown} {unit[:-1] if shown == '1' and unit.endswith('s') else unit}"


def _more(change: Change) -> str:
    return f"{'+' if change.difference > 0 else '-'}{amount(abs(change.difference), change.unit)}"


def _longer(change: Change) -> str:
    return "longer" if change.difference > 0 else "less"


def _kernels(cause: Cause, name: str) -> str:
    root = cause.root
    if root.base == 0:
        return f"{name} kernels are new ({_more(root)} a step)"
    return f"{name} kernels take {abs(root.relative or 0):.0%} {_longer(root)} ({_more(root)} a step)"


def _calls(cause: Cause, axis: str, kind: str, purpose: str) -> str:
    root = cause.root
    what = f"{kind} of {axis}" + (f" for {purpose.replace('_', ' ')}" if purpose != "unknown" else "")
    more = "more" if root.difference > 0 else "fewer"
    moved = next((change for change in cause.consequences if change.key == root.key[: -len("calls")] + "bytes"), None)
    size = f", {_more(moved)}" if moved is not None else ", the bytes unchanged"
    return f"{amount(abs(root.difference), 'calls')} {more} a step: {what} ({sizes(root)}{size})"


def _bytes(cause: Cause, axis: str, kind: str, purpose: str) -> str:
    root = cause.root
    types = _types(cause)
    more = "more" if root.difference > 0 else "fewer"
    what = f"{kind} of {axis}" + (f" for {purpose.replace('_', ' ')}" if purpose != "unknown" else "")
    return f"{what} moves {more} bytes a step in as many calls ({sizes(root)}){types}"


def _types(cause: Cause) -> str:
    """``: float32 instead of bfloat16`` where the classes of one type went and those of another came."""
    came: set[str] = set()
    went: set[str] = set()
    for change in cause.consequences:
        match = re.fullmatch(r"collectives\.[^.]*\.[^.]*\.[^.]*\.([^.]*)\.[^.]*\.calls", change.key)
        if match:
            (came if change.difference > 0 else went).add(match[1])
    if came and went and came != went:
        return f": {listed(sorted(came - went))} instead of {listed(sorted(went - came))}" if came - went and went - came else ""
    return ""


def _exposed(cause: Cause, axis: str) -> str:
    root = cause.root
    if root.difference > 0:
        return f"communication of {axis} is no longer hidden by compute ({_more(root)} exposed a step)"
    return f"compute hides more of the communication of {axis} ({_more(root)} exposed a step)"


def _phase(cause: Cause, phase: str, rank: str) -> str:
    root = cause.root
    return f"rank {rank} computes {abs(root.relative or 0):.0%} {_longer(root)} in {phase} ({_more(root)} a step)"


def _rank(cause: Cause, rank: str) -> str:
    root = cause.root
    return f"rank {rank} computes {abs(root.relative or 0):.0%} {_longer(root)} ({_more(root)} a step)"


def _compute(cause: Cause) -> str:
    root = cause.root
    families = sum(change.key.startswith("kernels.") for change in cause.consequences)
    all_of_it = "all compute, whatever the kernel, takes" if families else "compute takes"
    return f"{all_of_it} {abs(root.relative or 0):.0%} {_longer(root)} ({_more(root)} a step)"


def _transfer(cause: Cause, axis: str, kind: str, purpose: str, ranks: str | None) -> str:
    root = cause.root
    what = f"{kind} of {axis}" + (f" for {purpose.replace('_', ' ')}" if purpose != "unknown" else "")
    where = f" on ranks {listed(root.ranks)}" if ranks else ""
    if not root.base:
        return f"{what} is new{where} ({_more(root)} a step)"
    return f"the transfers of {what} take {abs(root.relative or 0):.0%} {_longer(root)}{where} ({_more(root)} a step)"


def _idle(cause: Cause) -> str:
    root = cause.root
    more = "longer" if root.difference > 0 else "less"
    return f"the device is idle {more} ({_more(root)} a step, {sizes(root)}), which nothing that runs on it explains: look at the host"


def _memory(cause: Cause, category: str) -> str:
    root = cause.root
    where = f" on {len(root.ranks)} ranks" if len(root.ranks) > 1 else f" on rank {root.ranks[0]}" if root.ranks else ""
    return f"{category.replace('_', ' ')}{' memory' if category == 'peak' else ''} {_more(root)}{where} ({sizes(root)})"


_CLASS = r"collectives\.([^.]*)\.([^.]*)\.([^.]*)"
_PHRASES = (
    (r"kernels\.(.*)\.time", _kernels),
    (_CLASS + r"\.calls", _calls),
    (_CLASS + r"\.bytes", _bytes),
    (_CLASS + r"\.transfer(@.*)?", _transfer),
    (r"exposed\.(.*)", _exposed),
    (r"phase\.(.*)\.compute@(\d+)", _phase),
    (r"step\.compute@(\d+)", _rank),
    (r"step\.compute", _compute),
    (r"step\.idle", _idle),
    (r"memory\.((?!unit\.).*)", _memory),
)
