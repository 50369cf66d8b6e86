"""What a whole job's pipeline is: schedule, size, and its bubble beside the one that its schedule cannot avoid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

from tracekit.analyses.pipeline.order import UNKNOWN, replayed_share, schedule_of
from tracekit.analyses.pipeline.ranges import KINDS
from tracekit.analyses.pipeline.rows import is_numbered, orders_of
from tracekit.errors import UsageError
from tracekit.estimate.pipeline import bubble_share, wall_bubble_share
from tracekit.graph.stages import stages_of
from tracekit.job.model import Job
from tracekit.units import NULL, listed

#: Schedules whose bubble depends on nothing but the number of stages and micro-batches.
_COUNTED = ("gpipe", "1f1b", "interleaved_1f1b", "forward_only")


@dataclass(frozen=True)
class Summary:
    """``ranks`` p of one pipeline hold ``virtual`` v stages each. Shares are of the wall time of one run of the schedule; None unknown.

    ``measured``: mean over ranks and runs. ``ideal``: of the schedule with equal stages and messages that take no time, from ``ideal_from``
    (closed form, or a replay of the order of work). ``equal``, ``replayed``: the order of work replayed with equal stages, and with the
    mean duration of every stage's pieces. ``ideal_twice``: the ideal with twice the micro-batches. ``numbered``: each piece is known by
    stage and micro-batch; else only when each rank works.
    """

    schedule: str
    source: str
    axis: str
    stages: int
    ranks: int
    virtual: int
    micro_batches: int
    replicas: int
    runs: int
    on_device: bool
    measured: float | None
    ideal: float | None
    ideal_from: str
    ideal_twice: float | None
    equal: float | None
    replayed: float | None
    notes: tuple[str, ...]
    numbered: bool = True


def summary_of(job: Job, axis: str, pieces: pd.DataFrame, runs: pd.DataFrame, left_out: int, on_device: bool) -> Summary:
    """Bring together what the manifests say and what the pieces of work show."""
    if not is_numbered(pieces):
        return _unnumbered(job, axis, pieces, runs, left_out, on_device)
    said, orders, named = _said(job), next(orders_of(pieces)), not stages_of(job).codes
    held = [{piece.stage for piece in own} for own in orders.values()]
    seen, virtual = set[int]().union(*held), max(map(len, held))
    size = next((a.size for a in job.mesh.axes if a.name == axis), 0)
    stages = max(_number(said, "stages"), size * virtual, max(seen) + 1)
    ranks, batches = size or -(-stages // virtual), int(pieces["micro_batch"].max()) + 1
    told = said.get("schedule")
    recorded = told[:64] if isinstance(told, str) else ""
    by_order, why = schedule_of(orders, stages, batches)
    schedule, means = recorded or by_order, mean_durations(pieces)
    equal = replayed = None
    if len(seen) == stages:
        equal = replayed_share(orders, lambda piece: _mean(means, piece.kind))
        replayed = replayed_share(orders, lambda piece: means.get((piece.stage, piece.kind), 0.0))
    ideal, ideal_from = _ideal(schedule, ranks, batches, virtual, means)
    if ideal is None and equal is not None:
        ideal, ideal_from = equal, "replay of the order of work with equal stages"
    known = runs[(runs["run_ns"] != NULL) & (runs["run_ns"] > 0)]
    return Summary(
        schedule=schedule,
        source="manifest" if recorded else "order of work" if named else "order of compute and messages",
        axis=axis,
        stages=stages,
        ranks=ranks,
        virtual=virtual,
        micro_batches=batches,
        replicas=int(pieces["replica"].max()) + 1,
        runs=len(pieces[["step", "turn"]].drop_duplicates()),
        on_device=on_device,
        measured=float((known["bubble_ns"] / known["run_ns"]).mean()) if len(known) else None,
        ideal=ideal,
        ideal_from=ideal_from,
        ideal_twice=_ideal(schedule, ranks, 2 * batches, virtual, means)[0],
        equal=equal,
        replayed=replayed,
        notes=(*_about_schedule(recorded, by_order, why), *_about_ranges(named), *_about_gaps(stages, seen, left_out, job.clock.aligned)),
    )


def _unnumbered(job: Job, axis: str, pieces: pd.DataFrame, runs: pd.DataFrame, left_out: int, on_device: bool) -> Summary:
    """What is known where no piece of work has a number: how many micro-batches pass, and when each rank works."""
    found, ranks = stages_of(job), int(pieces["stage"].max()) + 1
    known = runs[(runs["run_ns"] != NULL) & (runs["run_ns"] > 0)]
    why = f"which stage and micro-batch a rank works on is not told: {found.reason}. Record with tracekit to see it"
    return Summary(
        schedule=found.schedule or UNKNOWN,
        source="order of compute and messages",
        axis=axis,
        stages=ranks * found.held,
        ranks=ranks,
        virtual=found.held,
        micro_batches=found.batches,
        replicas=int(pieces["replica"].max()) + 1,
        runs=len(pieces[["step", "turn"]].drop_duplicates()),
        on_device=on_device,
        measured=float((known["bubble_ns"] / known["run_ns"]).mean()) if len(known) else None,
        ideal=None,
        ideal_from="",
        ideal_twice=None,
        equal=None,
        replayed=None,
        notes=(why, *_about_gaps(ranks, set(pieces["stage"].tolist()), left_out, job.clock.aligned)),
        numbered=False,
    )


def _about_schedule(recorded: str, by_order: str, why: str) -> list[str]:
    if not recorded:
        return [f"the schedule is not told: {why}"] if why else []
    if by_order in (recorded, UNKNOWN):
        return []
    return [f"the manifest calls the schedule {recorded}; the order of work is that of {by_order}"]


def _about_ranges(named: bool) -> list[str]:
    return [] if named else ["no range names the work of a stage: stages and micro-batches follow from the order of compute and messages"]


def _about_gaps(stages: int, seen: set[int], left_out: int, aligned: bool) -> list[str]:
    """What was not read or cannot be compared."""
    notes = []
    missing = sorted(set(range(min(stages, 10**4))) - seen)
    if missing:
        so = "the measured bubble is a lower bound" if 0 in seen else "how long a run of the schedule is cannot be told"
        notes.append(f"no rank with {'stage' if len(missing) == 1 else 'stages'} {listed(missing)} was read: {so}")
    if left_out:
        what = "rank's run of the schedule is" if left_out == 1 else "ranks' runs of the schedule are"
        notes.append(f"{left_out} {what} left out: not recorded whole on all ranks of the pipeline, or without backward")
    if not aligned:
        notes.append("the clocks of the hosts could not be aligned: no time between ranks is measured")
    return notes


def _said(job: Job) -> dict[str, Any]:
    return next((dict(w.manifest.pipeline) for w in job.windows if w.manifest is not None and w.manifest.pipeline), {})


def _number(said: dict[str, Any], key: str) -> int:
    """A count that a manifest gives; 0 where it is none that can be true."""
    value = said.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 10**6 else 0


def mean_durations(pieces: pd.DataFrame) -> dict[tuple[int, str], float]:
    """(stage, kind) -> mean duration of its pieces [ns], over all ranks and runs."""
    timed = pieces[pieces["start_ns"] != NULL]
    means = (timed["end_ns"] - timed["start_ns"]).groupby([timed["stage"], timed["kind"]]).mean()
    return {(int(stage), KINDS[int(kind)]): float(mean) for (stage, kind), mean in means.items()}  # type: ignore[misc, has-type]


def _mean(means: dict[tuple[int, str], float], kind: str) -> float:
    own = [value for (_, other), value in means.items() if other == kind]
    return sum(own) / len(own) if own else 0.0


def _ideal(schedule: str, p: int, m: int, v: int, means: dict[tuple[int, str], float]) -> tuple[float | None, str]:
    """(bubble share, where it is from); None where no closed form is known."""
    if schedule in _COUNTED:
        return float(wall_bubble_share(p, m, v)), "closed form"
    if schedule in ("zb_h1", "zb_h2"):
        try:
            f, b, w = (_mean(means, kind) for kind in "FIW")
            return float(bubble_share(schedule, p, m, f, b, w)), "closed form with mean durations"
        except UsageError:
            return None, ""
    return None, ""
