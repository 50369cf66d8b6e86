"""What changed between two sides: every quantity that either measured, exact ones compared value by value, times against their noise."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from tracekit.compare.align import Alignment, Samples, Side, align, array, samples, typical
from tracekit.compare.figures import FAMILIES, MOST_OPERATORS, MOST_UNITS, Quantity, Rule
from tracekit.compare.held import OwnerMoved, owners_moved
from tracekit.compare.statistics import Values, Verdict, judge, spread_of
from tracekit.units import listed

Outcome = Literal["same", "noise", "worse", "better", "changed", "not_measured"]

#: A time or share that moved by less is called the same, however sure it is.
SMALLEST = 0.01
#: Quantities looked at rank by rank as well: what one rank alone can be slow in.
_BY_RANK = re.compile(r"phase\..*\.compute|step\.compute")
#: Quantities that may move on the ranks of one group alone (a slow link), which the spread over all ranks hides.
_BY_GROUP = re.compile(r"collectives\..*\.transfer")
#: Those that moved by at least this share of the most are the group, if no other moved by more than half of it.
_TOGETHER = 0.5
#: Times from whose movement the drift between two recordings is read: those that are at least this share of a step.
_MOVING, _MOVING_SHARE, _MOVING_QUANTILE = re.compile(r"operator\..*\.time|kernels\..*\.time|collectives\..*\.transfer"), 0.01, 0.9


@dataclass(frozen=True)
class Change:
    """One quantity on both sides. ``base`` and ``new`` are means over ranks of the typical step [unit], None where not measured.

    ``ranks`` are those (or the stages) whose value changed, of exact quantities; ``rank`` is set where one rank is looked at alone.
    ``relative`` is (new - base) / base, None for a base of 0. ``noise`` is what a change must exceed, relative. ``at_least``: the sides
    (BASE, NEW) on which it is a lower bound.
    """

    key: str
    label: str
    unit: str
    rule: Rule
    outcome: Outcome
    base: float | None
    new: float | None
    relative: float | None = None
    noise: float | None = None
    p: float | None = None
    spread: float | None = None
    ranks: tuple[int, ...] = ()
    rank: int | None = None
    higher_is_better: bool = False
    why: str = ""
    at_least: tuple[str, ...] = ()

    @property
    def difference(self) -> float:
        """new - base; 0 where one is not known."""
        return 0.0 if self.base is None or self.new is None else self.new - self.base

    @property
    def moved(self) -> bool:
        """More than noise."""
        return self.outcome in ("worse", "better", "changed")


@dataclass(frozen=True)
class Comparison:
    """Both sides and every quantity of either, as they come in the figures. ``step_us`` is the base's step, None where not measured.

    ``owners``: what is new, gone, larger and smaller at the end of the snapshots of each rank.
    """

    base: Side
    new: Side
    alignment: Alignment
    changes: list[Change]
    step_us: float | None
    owners: list[OwnerMoved] = field(default_factory=list)

    def by_key(self) -> dict[str, Change]:
        """The changes by key."""
        return {change.key: change for change in self.changes}


def compare(base: Side, new: Side) -> Comparison:
    """Hold the recordings of NEW against those of BASE; each side has at least one."""
    alignment = align(base, new)
    sides = [[run.by_key() for run in side] for side in (base, new)]
    quantities: dict[str, Quantity] = {}
    for found in (*sides[0], *sides[1]):
        for key, quantity in found.items():
            quantities.setdefault(key, quantity)
    both = {key: _Pair(base, new, sides, quantity, alignment) for key, quantity in quantities.items()}
    step = both["step.time"].middle(0) if "step.time" in both else None
    noise = _Noise(_movement(both.values(), step), _steps_spread(both))
    changes: list[Change] = []
    for pair in both.values():
        change = _change(pair, noise)
        if change.key == "coverage.ranks" and alignment.by_role and all(len(run.ranks) == run.world_size for run in (*base, *new)):
            continue  # another world size, which the notes tell
        if change.outcome != "not_measured" or change.rule != "detail":
            changes.append(change)
        if _BY_RANK.fullmatch(pair.quantity.key) and not alignment.by_role:
            changes += _single_ranks(pair, noise)
        if _BY_GROUP.fullmatch(pair.quantity.key) and not alignment.by_role and not change.moved:
            changes += _some_ranks(pair, noise)
    return Comparison(base, new, alignment, changes, step, [] if alignment.by_role else owners_moved(base[0].held, new[0].held))


@dataclass(frozen=True)
class _Noise:
    """What is known of the noise of two single recordings: how far their times moved apart, and how far their steps spread, relative."""

    moved: float
    steps: float


class _Pair:
    """The values of one quantity on both sides: ``values[side][run]`` by role and step."""

    def __init__(
        self, base: Side, new: Side, found: Sequence[Sequence[Mapping[str, Quantity]]], quantity: Quantity, alignment: Alignment
    ) -> None:
        self.quantity = quantity
        self.alignment = alignment
        self.values: list[list[Samples]] = []
        self.why = ""
        sides = (("BASE", base), ("NEW", new)) if quantity.key == "memory.peak" else ()
        self.at_least = tuple(name for name, runs in sides if any(run.at_least for run in runs))
        for name, runs, keyed in (("BASE", base, found[0]), ("NEW", new, found[1])):
            rows = []
            for run, quantities in zip(runs, keyed, strict=True):
                own = quantities.get(quantity.key)
                if own is None:
                    word = quantity.key.partition(".")[0]
                    if _cut_off(quantity.key, quantities):
                        self.why = self.why or "not among the largest of every recording"
                        continue
                    if word in run.not_measured or not _sparse(word):
                        self.why = self.why or f"{name} has no {FAMILIES.get(word, word)}: {_reason(run.not_measured, word)}"
                        continue
                    own = Quantity(quantity.key, quantity.label, quantity.unit, quantity.rule, quantity.scope, [])
                    own = replace_values(own, [0.0] * len(run.places(quantity.scope)))
                rows.append(samples(run, own, alignment))
            self.values.append(rows)

    def roles(self) -> list[int]:
        """Roles with a value in every recording."""
        everywhere = [set(row) for side in self.values for row in side]
        return sorted(set.intersection(*everywhere)) if everywhere and all(self.values) else []

    def at(self, side: int, role: int) -> list[Values]:
        """Values of a role in each recording of a side, by step."""
        return [array(row[role]) for row in self.values[side]]

    def median(self, side: int, role: int) -> float:
        """Median over the recordings of the median over steps."""
        return float(np.median([float(np.median(values)) for values in self.at(side, role)]))

    def middle(self, side: int) -> float | None:
        """Mean over the roles of their medians."""
        roles = self.roles()
        return float(np.mean([self.median(side, role) for role in roles])) if roles else None

    def relative(self, roles: Iterable[int]) -> tuple[list[Values], list[Values]]:
        """(new, base): values of each recording over the base's median of their role; roles that hardly have any are left out."""
        scale = {role: self.median(0, role) for role in roles}
        most = max(scale.values(), default=0.0)
        kept = [role for role, value in scale.items() if value > 0.05 * most and value > 0]
        if not kept:
            return [], []
        new, base = ([np.concatenate([array(row[role]) / scale[role] for role in kept]) for row in self.values[side]] for side in (1, 0))
        return new, base


def replace_values(quantity: Quantity, values: Sequence[float]) -> Quantity:
    """The quantity with other values."""
    return Quantity(quantity.key, quantity.label, quantity.unit, quantity.rule, quantity.scope, list(values), quantity.higher_is_better)


def _sparse(word: str) -> bool:
    """Whether a key that a run lacks means none of it: a class of kernels or collectives that did not run, a unit that held nothing."""
    return word in ("exposed", "kernels", "operator", "collectives", "memory", "phase")


#: Keys of which a run keeps the largest only, and how many.
_KEPT = (("operator.", 2 * MOST_OPERATORS), ("memory.unit.", MOST_UNITS))


def _cut_off(key: str, quantities: Mapping[str, Quantity]) -> bool:
    """Whether a run may have this quantity without listing it, because others were larger."""
    return any(key.startswith(start) and sum(other.startswith(start) for other in quantities) >= most for start, most in _KEPT)


def _reason(not_measured: Mapping[str, str], word: str) -> str:
    return not_measured.get({"operator": "kernels"}.get(word, word), "the recording does not hold it")


def _movement(pairs: Iterable[_Pair], step: float | None) -> float:
    """How far the times of two recordings moved apart, relative: what nine of ten of them stay below."""
    moved = []
    for pair in pairs:
        if not _MOVING.fullmatch(pair.quantity.key):
            continue
        old, now = pair.middle(0), pair.middle(1)
        if old and now is not None and (step is None or old >= _MOVING_SHARE * step):
            moved.append(abs(now / old - 1))
    return float(np.quantile(moved, _MOVING_QUANTILE)) if moved else 0.0


def _steps_spread(pairs: Mapping[str, _Pair]) -> float:
    pair = pairs.get("step.time")
    new, base = pair.relative(pair.roles()) if pair is not None and pair.roles() else ([], [])
    return max((spread_of(values) for values in (*new, *base)), default=0.0)


def _change(pair: _Pair, noise: _Noise) -> Change:
    quantity = pair.quantity
    blank = Change(quantity.key, quantity.label, quantity.unit, quantity.rule, "not_measured", None, None, why=pair.why)
    blank = replace(blank, higher_is_better=quantity.higher_is_better, base=_known(pair, 0), new=_known(pair, 1), at_least=pair.at_least)
    if not pair.roles():
        return replace(blank, why=pair.why or "no rank has it in every recording")
    old, now = pair.middle(0), pair.middle(1)
    blank = replace(blank, base=old, new=now, relative=_relative(old, now), why="")
    if quantity.unit in ("bytes", "calls", "ranks", "files"):
        return _exact(blank, pair)
    return _statistical(blank, pair, pair.roles(), noise)


def _known(pair: _Pair, side: int) -> float | None:
    values = [value for row in pair.values[side] for by_step in row.values() for value in by_step.values()]
    return float(np.mean(values)) if values else None


def _relative(old: float | None, now: float | None) -> float | None:
    return None if old is None or now is None or old == 0 else now / old - 1


def _exact(blank: Change, pair: _Pair) -> Change:
    """Counts and bytes: equal, or not; those that vary from step to step in the base itself have to leave its range."""
    old, now, changed, varies = {}, {}, [], False
    for role in pair.roles():
        before, after = ([row[role] for row in side] for side in pair.values)
        old[role], now[role] = typical(_all(before)), typical(_all(after))
        if _varies(before, pair.alignment):
            varies = True
            low, high = min(min(row.values()) for row in before), max(max(row.values()) for row in before)
            old[role] = float(np.mean([v for row in before for v in row.values()]))
            now[role] = float(np.mean([v for row in after for v in row.values()]))
            if low <= now[role] <= high:
                continue
            changed.append(role)
        elif pair.alignment.steps is not None and pair.quantity.scope == "step":
            differ = [row[step] - before[0][step] for row in after for step in row if step in before[0] and row[step] != before[0][step]]
            if differ:
                changed.append(role)
                now[role] = old[role] + (differ[0] if len(set(differ)) == 1 else float(np.mean(differ)))
        elif old[role] != now[role]:
            changed.append(role)
    base, new = float(np.mean(list(old.values()))), float(np.mean(list(now.values())))
    result = replace(blank, base=base, new=new, relative=_relative(base, new), ranks=tuple(changed), noise=None if varies else 0.0)
    if not changed:
        return replace(result, outcome="same", new=base if not varies else new, relative=0.0 if not varies and base else result.relative)
    memory = blank.key.startswith("memory.")
    rises = any(now[role] > old[role] for role in changed) if memory else new > base
    if memory:
        worst = max(changed, key=lambda role: now[role] - old[role] if rises else old[role] - now[role])
        result = replace(result, base=old[worst], new=now[worst], relative=_relative(old[worst], now[worst]), rank=None)
    elif new == base:
        return replace(result, outcome="changed")
    return replace(result, outcome=_direction(rises, blank.higher_is_better))


def _all(rows: Sequence[Mapping[int, float]]) -> dict[int, float]:
    return {index * 1_000_003 + step: value for index, row in enumerate(rows) for step, value in row.items()}


def _varies(rows: Sequence[Mapping[int, float]], alignment: Alignment) -> bool:
    """Whether the base has no one value: recordings differ at a step, or steps among each other without numbers to tell them by."""
    if alignment.steps is None:
        counts = [len(set(row.values())) for row in rows]
        typicals = {typical(dict(row)) for row in rows}
        return len(typicals) > 1 or any(count > 1 and count > len(row) / 2 for count, row in zip(counts, rows, strict=True))
    return any(len({row[step] for row in rows if step in row}) > 1 for step in rows[0])


def _direction(rises: bool, higher_is_better: bool) -> Outcome:
    return "better" if rises == higher_is_better else "worse"


def _statistical(blank: Change, pair: _Pair, roles: Sequence[int], noise: _Noise) -> Change:
    new, base = pair.relative(roles)
    if not new or not base:
        if not blank.new:
            return replace(blank, outcome="same")
        return replace(blank, outcome=_direction(True, blank.higher_is_better))
    verdict = _judged(new, base, pair.quantity.scope == "job", noise)
    relative = blank.relative if blank.relative is not None else 0.0
    result = replace(blank, noise=verdict.drift, p=verdict.p, spread=verdict.spread)
    if abs(relative) < SMALLEST:
        return replace(result, outcome="same")
    if not verdict.beyond(relative):
        why = "too noisy for one recording a side" if verdict.too_noisy else ""
        return replace(result, outcome="noise", why=why)
    return replace(result, outcome=_direction(relative > 0, blank.higher_is_better))


def _judged(new: list[Values], base: list[Values], single: bool, noise: _Noise) -> Verdict:
    """Of one value a recording nothing is known of its spread: it may drift as far as the times did."""
    verdict = judge(new, base, noise.moved, noise.steps)
    return replace(verdict, drift=max(verdict.drift, noise.moved)) if single and min(len(new), len(base)) < 2 else verdict


def _single_ranks(pair: _Pair, noise: _Noise) -> list[Change]:
    """Ranks that moved away from the others: most of the change is theirs alone."""
    roles = pair.roles()
    if len(roles) < 2:
        return []
    old, now = (np.array([pair.median(side, role) for role in roles]) for side in (0, 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        moved = np.where(old > 0, now / old - 1, 0.0)
    found = []
    for place, role in enumerate(roles):
        others = np.delete(moved, place)
        excess = float(moved[place] - np.median(others))
        if abs(excess) <= max(abs(moved[place]) / 2, 3 * spread_of(others) if len(others) > 2 else 0.0, SMALLEST):
            continue
        quantity = pair.quantity
        label = f"{quantity.label} on rank {role}"
        blank = Change(
            f"{quantity.key}@{role}", label, quantity.unit, quantity.rule, "same", float(old[place]), float(now[place]), float(moved[place])
        )
        change = _statistical(replace(blank, rank=role), pair, [role], noise)
        if change.moved:
            found.append(change)
    return found


def _some_ranks(pair: _Pair, noise: _Noise) -> list[Change]:
    """Several ranks that moved together while the others stayed: the members of one group, of whose ranks there are others on the axis."""
    roles = pair.roles()
    moved = {role: _relative(pair.median(0, role), pair.median(1, role)) or 0.0 for role in roles}
    most = max(moved.values(), key=abs, default=0.0)
    chosen = [role for role in roles if moved[role] * most > 0 and abs(moved[role]) >= _TOGETHER * abs(most)]
    others = [abs(moved[role]) for role in roles if role not in chosen]
    if len(chosen) < 2 or not others or abs(most) < SMALLEST or max(others) > _TOGETHER / 2 * abs(most):
        return []
    quantity = pair.quantity
    old, now = (float(np.mean([pair.median(side, role) for role in chosen])) for side in (0, 1))
    label = f"{quantity.label} on ranks {listed(chosen)}"
    key = f"{quantity.key}@{'+'.join(map(str, chosen[:64]))}"
    blank = Change(key, label, quantity.unit, "detail", "same", old, now, _relative(old, now), ranks=tuple(chosen))
    change = _statistical(blank, pair, chosen, noise)
    return [change] if change.moved else []
