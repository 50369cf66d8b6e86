"""Which places of two sides stand beside each other: ranks by number or by role, steps by number or all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tracekit.compare.figures import FAMILIES, NO_STEP, Quantity, Run
from tracekit.compare.statistics import Values
from tracekit.errors import InputError

Side = Sequence[Run]


@dataclass(frozen=True)
class Alignment:
    """``ranks``: those that both sides have, None where the sides are different jobs and ranks stand for their role.

    ``steps``: numbers that all recordings share, None where steps are compared as they come. ``stage_axis``: the mesh axis by which roles
    are told apart, '' where all ranks play one. ``notes`` say so to a reader.
    """

    ranks: frozenset[int] | None
    steps: frozenset[int] | None
    stage_axis: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def by_role(self) -> bool:
        """The sides are different jobs."""
        return self.ranks is None


def align(base: Side, new: Side) -> Alignment:
    """Find what the two sides share. Raises InputError where one marks its steps and the other does not."""
    runs = [*base, *new]
    notes: list[str] = []
    _same_marks(base, new, notes)
    steps = _steps(base, new, notes)
    notes += [note for name, side in (("BASE", base), ("NEW", new)) for note in _at_least(name, side)]
    notes += _on_one_side(base, new)
    if _different_jobs(base, new, notes):
        axis = _stage_axis(runs)
        how = f"by their place on {axis}" if axis else "all together"
        notes.append(f"ranks are compared by role ({how}), counts and bytes by the rank that has most of them")
        return Alignment(None, steps, axis, notes)
    shared = frozenset.intersection(*(frozenset(run.ranks) for run in runs)) if runs else frozenset()
    everybody = frozenset.union(*(frozenset(run.ranks) for run in runs)) if runs else frozenset()
    if shared != everybody:
        notes.append(f"{len(everybody - shared)} of {len(everybody)} ranks are in some recordings only and are left out")
    return Alignment(shared, steps, "", notes)


def _same_marks(base: Side, new: Side, notes: list[str]) -> None:
    marked = [{step != NO_STEP for run in side for _, step in run.steps} for side in (base, new)]
    if not all(marked):
        return
    if any(False in found for found in marked) and any(True in found for found in marked):
        without = " and ".join(name for name, found in zip(("BASE", "NEW"), marked, strict=True) if False in found)
        problem = f"no steps are marked in {without}: a whole recorded window cannot be held against a step"
        raise InputError(problem, "record both with profiler.step(), or compare two without")
    if False in marked[0]:
        notes.append("no steps are marked: the whole recorded window of each is compared, as one step")


def _on_one_side(base: Side, new: Side) -> list[str]:
    """A sentence for what one side measured and the other did not."""
    found = []
    for word, label in FAMILIES.items():
        lacks = [bool(side) and all(word in run.not_measured for run in side) for side in (base, new)]
        if lacks[0] != lacks[1] and word not in ("mfu", "operator"):
            name, side = ("BASE", base) if lacks[0] else ("NEW", new)
            found.append(
                f"{label} of {name} {'is' if label in _SINGULAR else 'are'} not known ({side[0].not_measured[word]}): not compared"
            )
    return list(dict.fromkeys(found))


#: Of the labels of FAMILIES.
_SINGULAR = ("the time of a step", "exposed communication by axis", "compute by phase", "memory", "the pipeline", "coverage")


def _at_least(name: str, side: Side) -> list[str]:
    """A sentence where peaks of memory are lower bounds."""
    ranks = sorted({rank for run in side for rank in run.at_least})
    if not ranks:
        return []
    of = f"of rank{'s' if len(ranks) > 1 else ''} {_few(ranks)}"
    return [f"peak memory {of} in {name} is at least what is shown: what was allocated before its recording is not in it"]


def _different_jobs(base: Side, new: Side, notes: list[str]) -> bool:
    before = len(notes)
    for what, of in (("world size", _world), ("mesh", _mesh)):
        old, now = ({of(run) for run in side} - {None} for side in (base, new))
        if old and now and old != now:
            notes.append(f"{what}: {', '.join(sorted(map(str, old)))} in BASE, {', '.join(sorted(map(str, now)))} in NEW")
    devices = [{run.device for run in side if run.device} for side in (base, new)]
    different = len(notes) > before
    if all(devices) and devices[0] != devices[1]:
        notes.append(f"device: {', '.join(sorted(devices[0]))} in BASE, {', '.join(sorted(devices[1]))} in NEW")
    return different


def _world(run: Run) -> int | None:
    return run.world_size


def _mesh(run: Run) -> str | None:
    return ",".join(f"{name}={size}" for name, size in run.axes if size > 1) or None


def _stage_axis(runs: Side) -> str:
    """``pp`` where every run has that axis in one size and says where its ranks are."""
    sizes = {dict(run.axes).get("pp") for run in runs}
    return "pp" if len(sizes) == 1 and None not in sizes and sizes != {1} and all(run.roles for run in runs) else ""


def _steps(base: Side, new: Side, notes: list[str]) -> frozenset[int] | None:
    """Numbers that all recordings share, where they are most of one of them: a warm-up step more or less is not compared."""
    numbers = [frozenset(step for _, step in run.steps if step != NO_STEP) for run in (*base, *new)]
    if not numbers or not all(numbers):
        return None
    shared = frozenset.intersection(*numbers)
    least = min(len(found) for found in numbers)
    if 2 * len(shared) < least or not shared:
        notes.append("the recordings have other step numbers: the typical step of each is compared")
        return None
    if any(found != shared for found in numbers):
        notes.append(f"compared on the steps that all recordings have ({_few(sorted(shared))})")
    return shared


def _few(numbers: Sequence[int]) -> str:
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]}-{numbers[-1]}"
    return ", ".join(map(str, numbers[:6])) + (", ..." if len(numbers) > 6 else "")


#: role -> step -> value. A role is a rank, a stage, or NO_STEP for all ranks together.
Samples = dict[int, dict[int, float]]


def samples(run: Run, quantity: Quantity, alignment: Alignment) -> Samples:
    """The known values of a quantity by role and step. Of a role's ranks the mean of times counts, the most of counts and bytes."""
    gathered: dict[int, dict[int, list[float]]] = {}
    for (rank, step), value in zip(run.places(quantity.scope), quantity.values, strict=True):
        if value is None or (alignment.steps is not None and step != NO_STEP and step not in alignment.steps):
            continue
        if alignment.ranks is not None and rank != NO_STEP and rank not in alignment.ranks:
            continue
        role = rank if alignment.ranks is not None else _role(run, rank, alignment.stage_axis)
        gathered.setdefault(role, {}).setdefault(step, []).append(float(value))
    join = max if quantity.unit in ("bytes", "calls") else (lambda values: sum(values) / len(values))
    return {role: {step: join(values) for step, values in by_step.items()} for role, by_step in gathered.items()}


def _role(run: Run, rank: int, axis: str) -> int:
    place = run.roles.get(str(rank))
    if not axis or place is None:
        return NO_STEP
    return place[[name for name, _ in run.axes].index(axis)]


def typical(by_step: dict[int, float]) -> float:
    """The commonest value; of equally common ones the largest."""
    counts = Counter(by_step.values())
    most = max(counts.values())
    return max(value for value, count in counts.items() if count == most)


def array(by_step: dict[int, float]) -> Values:
    """Values in order of the steps."""
    return np.array([by_step[step] for step in sorted(by_step)], np.float64)
