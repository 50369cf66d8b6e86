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
from tracekit.mesh.process_groups import ProcessGroup
from tracekit.notes import Note, note
from tracekit.vocabulary import MeshSource


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


def layout(placed: Sequence[Placed], world_size: int | None, ranks: Sequence[int]) -> tuple[list[tuple[str, Span]], MeshSource, list[Note]]:
    """((name, span) of each axis, outermost first; where the names come from; notes)."""
    described, notes = _described(placed)
    candidates = [*described, *_undescribed(placed, world_size, ranks)]
    taken: list[_Candidate] = []
    notes += _take(taken, [c for c in candidates if c.kind < 2], world_size)
    notes += _take(taken, _left_over(taken, placed), world_size)
    notes += _take(taken, [c for c in candidates if c.kind >= 2], world_size)
    if not taken:
        return [], "none", notes
    named = any(candidate.name for candidate in taken)
    axes = _tiled(sorted(taken, key=lambda c: c.span), world_size)
    notes += _nameless(taken, axes, named)
    return axes[::-1], "descriptions" if named else "rank_lists", notes


def _take(taken: list[_Candidate], candidates: Sequence[_Candidate], world_size: int | None) -> list[Note]:
    """Add the candidates that fit to ``taken``; notes on those that do not tile the world."""
    notes = []
    for candidate in sorted(candidates, key=lambda c: c.trust):
        low, high = candidate.span
        if world_size is not None and world_size % high:
            if candidate.name:
                notes.append(note("axis_does_not_tile", axis=candidate.name, size=high // low, stride=low, world=world_size))
        elif all(_apart(candidate.span, other.span) for other in taken):
            taken.append(candidate)
    return notes


def _apart(a: Span, b: Span) -> bool:
    """Whether two spans can be axes of one mesh: they do not overlap, and the outer one starts at a whole number of the inner one."""
    inner, outer = min(a, b), max(a, b)
    return outer.low % inner.high == 0


def _described(placed: Sequence[Placed]) -> tuple[list[_Candidate], list[Note]]:
    """One candidate an axis name: the span that most of its groups have."""
    notes = []
    seen: dict[str, Counter[Span]] = {}
    for p in placed:
        if p.described and p.spans is not None and len(p.spans) == 1 and p.described != "embedding":
            seen.setdefault(p.described, Counter())[p.spans[0]] += 1
    for name, shapes in sorted(seen.items()):
        if len(shapes) > 1 and not is_overlay(name):
            notes.append(note("axis_of_several_shapes", axis=name, shapes=tuple((span.size, span.low) for span in sorted(shapes))))
    odd = [p.described for p in placed if p.spans is None and p.group.ranks is not None]
    irregular = {name for name in odd if name and not is_overlay(name)}
    if irregular:
        notes.append(note("irregular_groups", axes=tuple(sorted(irregular))))
    result = []
    for name, shapes in seen.items():
        span = max(shapes, key=lambda s: (shapes[s], s))
        result.append(_Candidate(name, span, shapes[span]))
    return result, notes


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


def _gaps(outer: Span, covered: Sequence[Span]) -> list[Span]:
    """What of a span the others leave uncovered, innermost first."""
    gaps, low = [], outer.low
    for span in sorted(s for s in covered if outer.low <= s.low < outer.high):
        if span.low > low:
            gaps.append(Span(low, span.low))
        low = span.high
    return [*gaps, Span(low, outer.high)] if outer.high > low else gaps


def _tiled(taken: Sequence[_Candidate], world_size: int | None) -> list[tuple[str, Span]]:
    """All axes, innermost first: what was taken, and the gaps between, named by stride and size."""
    named = [(candidate.name, candidate.span) for candidate in taken]
    world = Span(1, world_size if world_size is not None else taken[-1].span.high)
    every = sorted([*named, *(("", gap) for gap in _gaps(world, [span for _, span in named]))], key=lambda axis: axis[1])
    return [(name or f"axis_{span.low}x{span.size}", span) for name, span in every]


def _nameless(taken: Sequence[_Candidate], axes: Sequence[tuple[str, Span]], described: bool) -> list[Note]:
    """Notes on axes that no description names."""
    seen = {candidate.span for candidate in taken}
    neutral = [name for name, span in axes if name == f"axis_{span.low}x{span.size}"]
    if not described:
        return [note("axes_not_described", axes=tuple(neutral))]
    unseen = [name for name, span in axes if span not in seen and name in neutral]
    nameless = [name for name in neutral if name not in unseen]
    notes = [note("axes_without_group", axes=tuple(unseen))] if unseen else []
    return notes + ([note("axes_without_name", axes=tuple(nameless))] if nameless else [])
