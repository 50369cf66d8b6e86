"""One step of chosen ranks, drawn piece by piece on the job's clock.

Every rank keeps its last step in which the device did anything (without step marks the whole window): what ran on each stream, the
program's own ranges, and the host's forward, backward and optimizer phases. A step of more than KEPT pieces is coarsened: short
neighbours of one stream and one kind of work that begin in the same cell of time become one span that says how many it holds; the cell
grows until the step fits. Where kinds alternate so much that this does not help, neighbours of different kinds are merged too, under the
kind of the longest. No time is dropped: a merged span lasts from its first start to its last end, pauses inside a cell included.

The job shows the step that most ranks kept. Of more than SHOWN_RANKS ranks those are chosen that cause the most waiting and those that
cause the least.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from tracekit.analyses import stragglers
from tracekit.analyses._common import text_of
from tracekit.findings import Finding, Section, Timeline
from tracekit.graph.critical import KINDS, critical_path
from tracekit.graph.study import Study, study_of
from tracekit.job.activity import Activity, Work
from tracekit.job.model import Job
from tracekit.job.operations import is_context
from tracekit.trace.events import Category, Int64Array
from tracekit.trace.steps import PHASE_NAMES, step_times
from tracekit.units import NS_PER_US, known, listed

ORDER = 80

KEPT, SHOWN_RANKS = 3000, 16
#: Lanes of the host stand before all streams: annotations by their level of nesting, then phases.
HOST_LANE = -1
KEPT_ANNOTATIONS, MOST_LEVELS = 600, 8
_LONGEST_NAME = 160
#: With fewer cells than this a step shows too little of its course to keep kinds of work apart at any price.
_FEWEST_CELLS = 300


@dataclass(frozen=True)
class Spans:
    """Spans of one step on the window's own clock. ``name`` indexes ``names``, ``category`` indexes ``categories``.

    ``stream`` is HOST_LANE for phases and less for annotations; ``merged`` counts the pieces in each span. ``step`` is NULL without
    step marks.
    """

    step: int
    stream: Int64Array
    device: Int64Array
    start: Int64Array
    end: Int64Array
    name: Int64Array
    category: Int64Array
    merged: Int64Array
    names: list[str]
    categories: list[str]


def reduce(activity: Activity) -> Spans | None:
    """The spans of the last step with device work; None where there was none."""
    chosen = _last_step(activity)
    if chosen is None:
        return None
    number, low, high = chosen
    device = activity.device
    rows = np.flatnonzero((device.start < high) & (device.end > low))
    category, categories = _categories(activity, rows)
    # Streams of different devices are different lanes.
    lane = np.unique(np.stack([device.device[rows], device.stream[rows]]), axis=1, return_inverse=True)[1].reshape(-1)
    pieces = _Pieces(lane.astype(np.int64), device.start[rows], device.end[rows], device.name[rows].astype(np.int64), category, rows)
    kept, start, end, merged = _coarsened(pieces, low, high)
    codes, name = np.unique(pieces.name[kept], return_inverse=True)
    rows = rows[kept]
    spans = Spans(
        step=number,
        stream=device.stream[rows].astype(np.int64),
        device=device.device[rows].astype(np.int64),
        start=start,
        end=end,
        name=name.astype(np.int64),
        category=category[kept],
        merged=merged,
        names=[text_of(activity.tables, int(code))[:_LONGEST_NAME] for code in codes],
        categories=categories,
    )
    return _with_host(spans, activity, low, high)


def _last_step(activity: Activity) -> tuple[int, int, int] | None:
    """(number, start, end) of the step to keep."""
    device, times = activity.device, step_times(activity.steps, activity.window)
    for i in range(len(times) - 1, -1, -1):
        low, high = int(times.start[i]), int(times.end[i])
        first, last = np.searchsorted(device.start, [low, high])
        if last > first:
            return int(times.number[i]), low, high
    return None


def _categories(activity: Activity, rows: Int64Array) -> tuple[Int64Array, list[str]]:
    """Kind of work of each piece: compute, copy, or the kind of the collective."""
    names = ["compute", "communication", "copy"]
    work = activity.device.work[rows].astype(np.int64)
    kinds = pd.Categorical(activity.operations["kind"])
    known_kind = activity.device.operation[rows]
    communicates = (work == Work.COMMUNICATION) & (known_kind >= 0)
    result = work.copy()
    if communicates.any():
        codes = kinds.codes.astype(np.int64)[known_kind[communicates]]
        result[communicates] = np.where(codes >= 0, codes + len(names), int(Work.COMMUNICATION))
        names += [str(kind) for kind in kinds.categories]
    return result, names


@dataclass(frozen=True)
class _Pieces:
    """Device work of the step, sorted by start."""

    lane: Int64Array
    start: Int64Array
    end: Int64Array
    name: Int64Array
    category: Int64Array
    row: Int64Array


def _coarsened(pieces: _Pieces, low: int, high: int) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """(piece that names each span, start, end, pieces in it), at most about KEPT spans."""
    count = len(pieces.lane)
    everything = np.arange(count, dtype=np.int64)
    if count <= KEPT:
        return everything, pieces.start, pieces.end, np.ones(count, np.int64)
    order = np.lexsort((pieces.start, pieces.lane))
    lane, start, end, category = (column[order] for column in (pieces.lane, pieces.start, pieces.end, pieces.category))
    cell = max(1, (high - low) // KEPT)
    while True:
        short = end - start < cell
        slot = (start - low) // cell
        alike = short[1:] & short[:-1] & (slot[1:] == slot[:-1]) & (lane[1:] == lane[:-1])
        if cell < (high - low) // _FEWEST_CELLS:
            alike &= category[1:] == category[:-1]
        opens = np.append(True, ~alike)
        if int(opens.sum()) <= KEPT or cell > high - low:
            break
        cell *= 2
    first = np.flatnonzero(opens)
    run = np.cumsum(opens) - 1
    longest = np.lexsort((-(end - start), run))[first]  # runs are contiguous: the first of each run in this order is its longest
    size = np.diff(np.append(first, count))
    return order[longest], start[first], np.maximum.reduceat(end, first), size.astype(np.int64)


def _with_host(spans: Spans, activity: Activity, low: int, high: int) -> Spans:
    """The spans with the host's annotations and phases in front, clipped to the step."""
    phases = activity.phases
    inside = np.flatnonzero((phases.start < high) & (phases.end > low) & (phases.kind > 0))[:KEPT]
    rows, level = _annotations(activity, low, high)
    tables = activity.tables
    codes, code = np.unique(tables.name[rows], return_inverse=True)
    names = [*spans.names, *PHASE_NAMES[1:], *(text_of(tables, int(c))[:_LONGEST_NAME] for c in codes)]
    first = len(spans.names) + len(PHASE_NAMES) - 1
    start = np.concatenate([tables.ts[rows], phases.start[inside]])
    end = np.concatenate([tables.ts[rows] + tables.dur[rows], phases.end[inside]])
    lane = np.concatenate([level - MOST_LEVELS + HOST_LANE, np.full(len(inside), HOST_LANE)])
    kind = np.repeat([len(spans.categories) + 1, len(spans.categories)], [len(rows), len(inside)])
    name = np.concatenate([first + code.reshape(-1), len(spans.names) + phases.kind[inside].astype(np.int64) - 1])
    return Spans(
        step=spans.step,
        stream=np.concatenate([lane, spans.stream]),
        device=np.concatenate([np.full(len(start), HOST_LANE), spans.device]),
        start=np.concatenate([np.maximum(start, low), spans.start]),
        end=np.concatenate([np.minimum(end, high), spans.end]),
        name=np.concatenate([name, spans.name]),
        category=np.concatenate([kind, spans.category]),
        merged=np.concatenate([np.ones(len(start), np.int64), spans.merged]),
        names=names,
        categories=[*spans.categories, "phase", "annotation"],
    )


def _annotations(activity: Activity, low: int, high: int) -> tuple[Int64Array, Int64Array]:
    """The program's own ranges on the host, at most KEPT_ANNOTATIONS (the longest): (event rows, level of nesting below MOST_LEVELS).

    Ranges of a backend and marks of steps are left out: the operations and the step itself show them.
    """
    tables = activity.tables
    rows = tables.rows(Category.USER_ANNOTATION)
    start, duration = tables.ts[rows], tables.dur[rows]
    rows = rows[(duration > 0) & (start < high) & (start + np.maximum(duration, 0) > low)]
    rows = rows[tables.each_text(tables.name[rows], is_context)]
    rows = rows[np.argsort(-tables.dur[rows], kind="stable")[:KEPT_ANNOTATIONS]]
    rows = rows[np.lexsort((-tables.dur[rows], tables.ts[rows]))]
    free = [0] * MOST_LEVELS  # when each level is free again
    level = np.zeros(len(rows), np.int64)
    for i, (begin, length) in enumerate(zip(tables.ts[rows].tolist(), tables.dur[rows].tolist(), strict=True)):
        level[i] = next((n for n, end in enumerate(free) if end <= begin), MOST_LEVELS - 1)
        free[level[i]] = begin + length
    return rows, level


@dataclass(frozen=True)
class StepTimeline:
    """``spans`` has the columns of findings.Timeline, times from the earliest span; ``step`` is None where no step is marked."""

    spans: pd.DataFrame
    step: int | None
    note: str

    def findings(self) -> list[Finding]:
        """Nothing: it is a picture."""
        return []

    def sections(self) -> list[Section]:
        """The timeline."""
        if not len(self.spans):
            return []
        title = "The whole trace" if self.step is None else f"Step {self.step}"
        lead = "What ran when, on every stream, on one clock. Zoom in for single kernels. A collective starts when its rank arrives."
        return [Section("Timeline", lead, (Timeline(title, self.spans, note=self.note),), name="timeline")]

    def json(self) -> dict[str, Any]:
        """Nothing: single pieces are not in the JSON."""
        return {}


def analyze(job: Job) -> StepTimeline:
    """Lay the common step of the chosen ranks on one clock."""
    kept = [(rank, index, spans) for rank, index, spans in job.reduced("timeline") if spans is not None]
    empty = pd.DataFrame({"lane": [], "start_us": [], "end_us": [], "name": [], "category": []})
    if not kept:
        return StepTimeline(empty, None, "")
    votes = Counter(spans.step for _, _, spans in kept)
    step = max(votes, key=lambda number: (votes[number], number))
    here = {rank: (index, spans) for rank, index, spans in kept if spans.step == step}
    ranks = _chosen(job, sorted(here))
    zero = min(int(job.aligned(here[rank][0], here[rank][1].start).min()) for rank in ranks)
    frames = [_frame(rank, here[rank][1], int(job.aligned(here[rank][0], -zero))) for rank in ranks]
    frames += _critical(job, step, zero)
    return StepTimeline(pd.concat(frames, ignore_index=True), known(step), _note(job, here, ranks, kept))


def _critical(job: Job, step: int, zero: int) -> list[pd.DataFrame]:
    """The critical path through the step as a lane of its own, under the ranks."""
    study = study_of(job)
    if not isinstance(study, Study) or len(study.places.ranks) < 2:
        return []
    graph, path = study.graph, critical_path(study.graph)
    node = path.node
    own = (graph.numbers[graph.step[node]] == step) & (path.end > zero)
    if not own.any():
        return []
    ranks, codes = graph.rank[node[own]].tolist(), graph.name[node[own]].tolist()
    names = [f"rank {rank}: {graph.names[code]}" for rank, code in zip(ranks, codes, strict=True)]
    kinds = [KINDS[kind] for kind in path.kind[own].tolist()]
    return [
        pd.DataFrame(
            {
                "lane": "critical path",
                "start_us": np.maximum(path.start[own] - zero, 0) / NS_PER_US,
                "end_us": (path.end[own] - zero) / NS_PER_US,
                "name": names,
                "category": kinds,
            }
        ).tail(KEPT)
    ]


def _chosen(job: Job, ranks: list[int]) -> list[int]:
    if len(ranks) <= SHOWN_RANKS:
        return ranks
    caused = stragglers.analyze(job).caused_by_rank()
    order = sorted(ranks, key=lambda rank: (-caused.get(rank, 0), rank))
    half = SHOWN_RANKS // 2
    return sorted(order[:half] + order[-half:])


def _note(job: Job, here: dict[int, Any], ranks: list[int], kept: list[tuple[int, int, Spans]]) -> str:
    parts = []
    if len(ranks) < len(here):
        parts.append(f"{len(ranks)} of {len(here)} ranks are shown: those that cause the most and the least waiting.")
    other = sorted({rank for rank, _, _ in kept} - set(here))
    if other:
        parts.append(f"{'Rank' if len(other) == 1 else 'Ranks'} {listed(other)} recorded other steps.")
    if not job.clock.aligned:
        parts.append("The clocks of the hosts could not be aligned: compare times within one host only.")
    if any((spans.merged > 1).any() for _, spans in here.values()):
        parts.append("Short neighbours are merged into one span, which says how many it holds.")
    return " ".join(parts)


def _frame(rank: int, spans: Spans, shift: int) -> pd.DataFrame:
    """Spans of one rank, ``shift`` [ns] later, lanes in the order of host, then device and stream."""
    start, end = spans.start + shift, spans.end + shift
    many = len(np.unique(spans.device[spans.device >= 0])) > 1
    order = np.lexsort((start, spans.stream, spans.device))
    names = [spans.names[i] for i in spans.name[order]]
    lanes = [_lane(rank, s, d, many) for s, d in zip(spans.stream[order].tolist(), spans.device[order].tolist(), strict=True)]
    merged = spans.merged[order].tolist()
    return pd.DataFrame(
        {
            "lane": lanes,
            "start_us": start[order] / NS_PER_US,
            "end_us": end[order] / NS_PER_US,
            "name": [name if count == 1 else f"{name} + {count - 1} more" for name, count in zip(names, merged, strict=True)],
            "category": [spans.categories[i] for i in spans.category[order]],
        }
    )


def _lane(rank: int, stream: int, device: int, many: bool) -> str:
    if stream == HOST_LANE and device == HOST_LANE:
        return f"rank {rank} · host phases"
    if stream < HOST_LANE and device == HOST_LANE:
        level = stream - HOST_LANE + MOST_LEVELS
        return f"rank {rank} · annotations" + (f" {level + 1}" if level else "")
    where = f"device {device}, " if many and device >= 0 else ""
    return f"rank {rank} · {where}stream {stream}"
