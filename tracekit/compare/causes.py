"""Causes before consequences: which change explains which.

EDGES says what can follow from what, by keys: an effect stands under the largest change that can explain it, and moves the same way as it
(what idles or is hidden moves as it likes). A change that nothing explains is a root.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tracekit.compare.changes import Change

_COLLECTIVE = r"collectives\.(?P<class>(?P<axis>[^.]*)\.(?P<kind>[^.]*)\.(?P<purpose>[^.]*))"

#: (effect, what can cause it, whether both have to move the same way). ``{name}`` is what the effect's group of that name matched.
_TIMES = (r"step\..*", r"phase\..*", r"kernels\..*", r"exposed\..*", r"collectives\..*")
_COMPUTE = (r"(phase|step)\..*compute(@\d+)?", r"kernels\..*")
EDGES: tuple[tuple[str, tuple[str, ...], bool], ...] = (
    (r"operator\.(?P<name>.*)\.time", (r"kernels\..*\.time", r"operator\.{name}\.calls"), True),
    (r"operator\.(?P<name>.*)\.calls", (r"kernels\..*\.calls",), True),
    (r"kernels\.(?P<name>.*)\.time", (r"kernels\.{name}\.calls", r"(phase|step)\..*compute@\d+"), True),
    (r"phase\.(?P<name>[^.]*)\.compute", (r"phase\.{name}\.compute@\d+", r"kernels\..*\.time", "step.compute"), True),
    (r"phase\.(?P<name>[^.]*)\.compute@\d+", (r"kernels\..*\.calls",), True),
    (r"step\.compute@(?P<rank>\d+)", (r"phase\..*\.compute@{rank}", r"kernels\..*"), True),
    (r"step\.compute", (r"phase\..*", r"step\.compute@\d+", r"kernels\..*"), True),
    (_COLLECTIVE + r"\.bytes", (r"collectives\.{class}\.calls",), True),
    (_COLLECTIVE + r"\.transfer", (r"collectives\.{class}\.(calls|bytes)",), True),
    (_COLLECTIVE + r"\.wait", (r"collectives\.{class}\.(calls|bytes|transfer(@.*)?)", *_COMPUTE), False),
    (_COLLECTIVE + r"\.[^.]*\.[^.]*\.calls", (r"collectives\.{class}\.(calls|bytes)",), False),
    (r"exposed\.(?P<axis>.*)", (r"collectives\.{axis}\..*\.(calls|bytes|transfer|wait)(@.*)?", *_COMPUTE), False),
    (r"step\.(exposed_comm|hidden_comm)", (r"exposed\..*", r"collectives\..*", *_COMPUTE), False),
    (r"step\.(idle|exposed_copy|unknown)", (r"step\.(?!time|idle).*", *_TIMES[1:]), False),
    (r"pipeline\.bubble_share", (r"exposed\.pp", r"collectives\.pp\..*", *_COMPUTE), False),
    (r"step\.time", (r"pipeline\..*", *_TIMES, r"step\.idle"), True),
    (r"mfu", _TIMES, False),
    (r"memory\.unit\.(?P<name>[^.]*)\..*", (r"memory\.{name}",), False),
    (r"memory\.(gathered_parameters|unsharded_gradients)", (r"collectives\..*\.parameter_gather\.(calls|bytes)",), False),
    (r"memory\.(communication_buffers|gradients)", (r"collectives\..*\.(calls|bytes)",), False),
    (r"memory\.peak", (r"memory\.(?!reserved|unit|peak).*", r"collectives\..*\.parameter_gather\.(calls|bytes)"), False),
    (r"memory\.reserved", (r"memory\.(?!reserved|unit).*",), True),
)
_COMPILED = tuple((re.compile(effect), causes, same) for effect, causes, same in EDGES)

#: Compute that changed by one factor in this many families, within this share of it, is the device, not the kernels.
UNIFORM_FAMILIES, UNIFORM_WITHIN = 4, 0.35


#: A time follows from another that changed by at least this share of its own change.
ENOUGH = 0.3


@dataclass(frozen=True)
class Cause:
    """One thing that changed, and what followed from it, the largest first."""

    root: Change
    consequences: list[Change]


def causes(changes: Sequence[Change]) -> list[Cause]:
    """The changes that are more than noise, as roots with their consequences, the costliest root first."""
    moved = [change for change in changes if change.moved]
    uniform = _uniform(moved)
    parent = {change.key: uniform if change in uniform_members(moved, uniform) else _parent(change, moved) for change in moved}
    if uniform is not None:
        parent[uniform.key] = None
    _one_rank(moved, parent)
    _under_the_peak(moved, parent)
    members: dict[str, list[Change]] = {}
    by_key = {change.key: change for change in moved}
    for change in moved:
        members.setdefault(_root(change, parent).key, []).append(change)
    found = []
    for key, group in members.items():
        rest = [change for change in group if change.key != key]
        found.append(Cause(by_key[key], sorted(rest, key=_weight, reverse=True)))
    return sorted(found, key=_order, reverse=True)


def _one_rank(moved: Sequence[Change], parent: dict[str, Change | None]) -> None:
    """A rank that is slower in several phases is one cause: its compute as a whole."""
    for whole in moved:
        if not re.fullmatch(r"step\.compute@\d+", whole.key):
            continue
        phases = [c for c in moved if re.fullmatch(r"phase\.[^@]*\.compute@\d+", c.key) and c.rank == whole.rank]
        phases = [phase for phase in phases if (phase.difference > 0) == (whole.difference > 0) and parent[phase.key] is None]
        if len(phases) > 1:
            parent[whole.key] = None
            parent.update(dict.fromkeys((phase.key for phase in phases), whole))


def _under_the_peak(moved: Sequence[Change], parent: dict[str, Change | None]) -> None:
    """What lives at the peak differs wherever the peak is another moment: it stands under what moved the peak."""
    peak = next((change for change in moved if change.key == "memory.peak"), None)
    if peak is None:
        return
    cause = _root(peak, parent)
    for change in moved:
        if change.key.startswith("memory.") and change.rule == "detail" and _root(change, parent) is not cause:
            top = _root(change, parent)
            if top.key.startswith("memory.") and top.rule == "detail":
                parent[top.key] = cause


def _uniform(moved: Sequence[Change]) -> Change | None:
    """``step.compute`` where every family of kernels moved about as far as it."""
    compute = next((change for change in moved if change.key == "step.compute" and change.relative), None)
    if compute is None or compute.relative is None:
        return None
    families = _families(moved)
    near = [abs(family.relative / compute.relative - 1) <= UNIFORM_WITHIN for family in families if family.relative is not None]
    return compute if len(near) >= UNIFORM_FAMILIES and sum(near) >= 0.75 * len(near) else None


def _families(moved: Sequence[Change]) -> list[Change]:
    return [change for change in moved if re.fullmatch(r"kernels\..*\.time", change.key)]


def uniform_members(moved: Sequence[Change], uniform: Change | None) -> list[Change]:
    """The families that a uniform change explains."""
    return _families(moved) if uniform is not None else []


def _parent(effect: Change, moved: Sequence[Change]) -> Change | None:
    """The largest change that can explain this one, and enough of it; idle time that nothing explains is its own cause (the host's)."""
    best: Change | None = None
    most: tuple[bool, int, float] = (False, 0, 0.0)
    for pattern, templates, same in _COMPILED:
        match = pattern.fullmatch(effect.key)
        if match is None:
            continue
        names = {name: re.escape(value) for name, value in match.groupdict().items()}
        allowed = re.compile("|".join(_filled(template, names) for template in templates))
        for cause in moved:
            if cause.key == effect.key or not allowed.fullmatch(cause.key):
                continue
            if same and (cause.difference > 0) != (effect.difference > 0):
                continue
            weight = (_enough(cause, effect), *_weight(cause))
            if effect.key == "step.idle" and not weight[0]:
                continue
            if best is None or weight > most:
                best, most = cause, weight
        break
    return best


def _enough(cause: Change, effect: Change) -> bool:
    """Whether a change of time is large enough to be what another follows from; of counts and bytes nobody can tell."""
    return cause.unit != "us" or effect.unit != "us" or abs(cause.difference) >= ENOUGH * abs(effect.difference)


def _filled(template: str, names: dict[str, str]) -> str:
    for name, value in names.items():
        template = template.replace("{" + name + "}", value)
    return template


def _root(change: Change, parent: dict[str, Change | None]) -> Change:
    """Follow the explanations up; a circle ends where it began."""
    seen = {change.key}
    while (above := parent[change.key]) is not None and above.key not in seen:
        change = above
        seen.add(change.key)
    return change


#: Where two changes can both explain a third, the one further up counts: counts and bytes, then kernels, phases, times.
_RANK = (
    r".*\.calls",
    r".*\.bytes",
    r".*compute@\d+",
    r"kernels\..*",
    r"phase\..*",
    r"collectives\..*",
    r"exposed\..*",
    r"step\.(?!time).*",
    r"memory\..*",
)


def _weight(change: Change) -> tuple[int, float]:
    place = next((place for place, pattern in enumerate(_RANK) if re.fullmatch(pattern, change.key)), len(_RANK))
    return len(_RANK) - place, abs(change.difference)


def _order(cause: Cause) -> tuple[int, int, float]:
    """Worse before better; what is gated before what is only shown; then by the time it costs, then by its share."""
    worse = cause.root.outcome == "worse" or any(change.outcome == "worse" and change.rule != "detail" for change in cause.consequences)
    gated = any(change.rule != "detail" for change in (cause.root, *cause.consequences))
    time = max((abs(change.difference) for change in (cause.root, *cause.consequences) if change.unit == "us"), default=0.0)
    return int(worse), int(gated), time + abs(cause.root.relative or 0.0)
