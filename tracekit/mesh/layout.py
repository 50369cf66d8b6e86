"""Axes of a mesh from the groups that were seen: each regular group covers a span of strides, and the spans of a mesh tile the world.

Candidates are the spans of described groups, then those of the others. In order of trust each is taken if it neither overlaps nor breaks
what was taken before it; what stays uncovered between 1 and the world size becomes an axis of its own, so that ranks have coordinates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tracekit.mesh.lattice import Span
from tracekit.mesh.names import DIMENSIONS, is_overlay, parts
from tracekit.mesh.process_groups import ProcessGroup, some


class Sized(Protocol):
    """What has a name and a size: mesh.Axis."""

    @property
    def name(self) -> str:
        """Name of the axis."""

    @property
    def size(self) -> int:
        """Ranks along it."""


@dataclass(frozen=True)
class Placed:
    """A group, the axis that its description names ('' none), and its spans (None: no group of a regular mesh, or members unknown)."""

    group: ProcessGroup
    described: str
    spans: tuple[Span, ...] | None


@dataclass(frozen=True)
class _Candidate:
    """A span that may be an axis. ``name`` is '' where no description names it."""

    name: str
    span: Span
    seen: int

    @property
    def trust(self) -> tuple[int, int, int, int, Span, str]:
        """Most trusted first; of one kind the finest, then the usual name."""
        known = DIMENSIONS.index(self.name) if self.name in DIMENSIONS else len(DIMENSIONS)
        return (self.kind, self.span.size, known, -self.seen, self.span, self.name)

    @property
    def kind(self) -> int:
        """0: a dimension; 1: several flattened; 2: lies over dimensions of other names; 3: nothing describes it."""
        if not self.name:
            return 3
        return 0 if not is_overlay(self.name) else (1 if len(parts(self.name)) > 1 else 2)


def span_of_axes(axes: Sequence[Sized]) -> list[tuple[str, Span]]:
    """(name, span) of each axis of a row-major mesh, outermost first."""
    result, low = [], 1
    for axis in reversed(axes):
        result.append((axis.name, Span(low, low * axis.size)))
        low *= axis.size
    return result[::-1]


def layout(placed: Sequence[Placed], world_size: int | None, ranks: Sequence[int], notes: list[str]) -> tuple[list[tuple[str, Span]], str]:
    """((name, span) of each axis, outermost first; where the names come from: descriptions, rank_lists or none)."""
    candidates = [*_described(placed, notes), *_undescribed(placed, world_size, ranks)]
    taken: list[_Candidate] = []
    _take(taken, [c for c in candidates if c.kind < 2], world_size, notes)
    _take(taken, _left_over(taken, placed), world_size, notes)
    _take(taken, [c for c in candidates if c.kind >= 2], world_size, notes)
    if not taken:
        return [], "none"
    described = any(candidate.name for candidate in taken)
    axes = _tiled(sorted(taken, key=lambda c: c.span), world_size)
    _note_nameless(taken, axes, described, notes)
    return axes[::-1], "descriptions" if described else "rank_lists"


def _take(taken: list[_Candidate], candidates: Sequence[_Candidate], world_size: int | None, notes: list[str]) -> None:
    for candidate in sorted(candidates, key=lambda c: c.trust):
        low, high = candidate.span
        if world_size is not None and world_size % high:
            if candidate.name:
                notes.append(f"groups of axis {candidate.name} ({high // low} ranks, stride {low}) do not tile {world_size} ranks")
        elif all(_apart(candidate.span, other.span) for other in taken):
            taken.append(candidate)


def _apart(a: Span, b: Span) -> bool:
    """Whether two spans can be axes of one mesh: they do not overlap, and the outer one starts at a whole number of the inner one."""
    inner, outer = min(a, b), max(a, b)
    return outer.low % inner.high == 0


def _described(placed: Sequence[Placed], notes: list[str]) -> list[_Candidate]:
    """One candidate an axis name: the span that most of its groups have."""
    seen: dict[str, Counter[Span]] = {}
    for p in placed:
        if p.described and p.spans is not None and len(p.spans) == 1 and p.described != "embedding":
            seen.setdefault(p.described, Counter())[p.spans[0]] += 1
    for name, shapes in sorted(seen.items()):
        if len(shapes) > 1 and not is_overlay(name):
            shown = ", ".join(f"{span.size} ranks at stride {span.low}" for span in sorted(shapes))
            notes.append(f"groups of axis {name} have different shapes: {shown}")
    odd = [p.described for p in placed if p.spans is None and p.group.ranks is not None]
    irregular = {name for name in odd if name and not is_overlay(name)}
    if irregular:
        notes.append(f"groups of axis {some(sorted(irregular))} are not regular lists of ranks: they are known by description alone")
    result = []
    for name, shapes in seen.items():
        span = max(shapes, key=lambda s: (shapes[s], s))
        result.append(_Candidate(name, span, shapes[span]))
    return result


def _undescribed(placed: Sequence[Placed], world_size: int | None, ranks: Sequence[int]) -> list[_Candidate]:
    """Spans of groups that no description names, and the single levels of groups over several axes.

    Every rank of a mesh is in a group along each axis: a shape in which ranks that were read have no group (a group made for a few
    ranks only) is no axis. The group of all ranks is none either.
    """
    members: dict[tuple[Span, ...], set[int]] = {}
    count: Counter[tuple[Span, ...]] = Counter()
    for p in placed:
        several = p.spans is not None and len(p.spans) > 1
        if p.spans and p.group.ranks is not None and (not p.described or several) and p.group.size != world_size:
            members.setdefault(p.spans, set()).update(p.group.ranks)
            count[p.spans] += 1
    shapes = [shape for shape, who in members.items() if who.issuperset(ranks)]
    return [_Candidate("", span, count[shape]) for shape in shapes for span in shape]


def _left_over(taken: Sequence[_Candidate], placed: Sequence[Placed]) -> list[_Candidate]:
    """Dimensions without a group of their own, from flattened axes: where dp_shard_cp covers cp and something else, that is dp_shard."""
    found: dict[str, _Candidate] = {}
    for p in placed:
        inside = [t for t in taken if any(w.low <= t.span.low and t.span.high <= w.high for w in p.spans or ())]
        names = [name for name in parts(p.described) if name not in [t.name for t in inside]]
        if len(names) != 1 or not inside or len(inside) != len(parts(p.described)) - 1 or names[0] in [t.name for t in taken]:
            continue
        gaps = [gap for w in p.spans or () for gap in _gaps(w, [t.span for t in inside])]
        if len(gaps) == 1 and gaps[0].high % gaps[0].low == 0:
            found.setdefault(names[0], _Candidate(names[0], gaps[0], 1))
    return list(found.values())


def _gaps(whole: Span, covered: Sequence[Span]) -> list[Span]:
    """What of a span the others leave uncovered, innermost first."""
    gaps, low = [], whole.low
    for span in sorted(s for s in covered if whole.low <= s.low < whole.high):
        if span.low > low:
            gaps.append(Span(low, span.low))
        low = span.high
    return [*gaps, Span(low, whole.high)] if whole.high > low else gaps


def _tiled(taken: Sequence[_Candidate], world_size: int | None) -> list[tuple[str, Span]]:
    """All axes, innermost first: what was taken, and the gaps between, named by stride and size."""
    named = [(candidate.name, candidate.span) for candidate in taken]
    whole = Span(1, world_size if world_size is not None else taken[-1].span.high)
    every = sorted([*named, *(("", gap) for gap in _gaps(whole, [span for _, span in named]))], key=lambda axis: axis[1])
    return [(name or f"axis_{span.low}x{span.size}", span) for name, span in every]


def _note_nameless(taken: Sequence[_Candidate], axes: Sequence[tuple[str, Span]], described: bool, notes: list[str]) -> None:
    seen = {candidate.span for candidate in taken}
    neutral = [name for name, span in axes if name == f"axis_{span.low}x{span.size}"]
    if not described:
        notes.append(f"no process group describes its axis: axes are named by stride and size ({some(neutral)}); --mesh names them")
        return
    unseen = [name for name, span in axes if span not in seen and name in neutral]
    nameless = [name for name in neutral if name not in unseen]
    if unseen:
        notes.append(f"no process group was seen along {some(unseen)} (named by stride and size)")
    if nameless:
        notes.append(f"no description names {some(nameless)} (named by stride and size)")
