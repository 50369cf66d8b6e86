"""Every step of every rank, drawn piece by piece on the job's clock.

A window keeps spans of each of its steps (``spans.py``): what ran on each stream, the program's own ranges, and the host's forward,
backward and optimizer phases; most of its last one. The page holds all steps and all ranks: of the step that is shown first and the ranks
that cause the most and the least waiting everything that was kept, of the others as much as the page has room for. Waits, the critical
path and the places where findings can be seen (``stretches.py``) are given for every step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from tracekit.analyses import stragglers
from tracekit.analyses.timeline.spans import HOST_LANE, KEPT, MOST_LEVELS, Spans, steps_kept
from tracekit.analyses.timeline.stretches import critical, stretches, waits
from tracekit.findings import Finding, Section, Timeline
from tracekit.job.activity import Activity
from tracekit.job.model import Job
from tracekit.units import NS_PER_US, NULL, known, listed

ORDER = 80
COLUMNS = ("step", "lane", "start_us", "end_us", "name", "category", "merged")

SHOWN_RANKS = 16
#: Spans that a page holds: those of the step and ranks shown first come whole, then at most so many of each step and rank: other steps of
#: these ranks, the step of other ranks, all else. Of none less than FEWEST.
MOST_SPANS = 300_000
SHARES = (1500, 400, 100)
FEWEST = 24
#: Columns of some spans: COLUMNS, texts as codes.
_Part = dict[str, Any]


def reduce(activity: Activity) -> list[Spans] | None:
    """The spans of every step with device work; None where there was none."""
    return steps_kept(activity) or None


@dataclass(frozen=True)
class StepTimeline:
    """``spans`` has the columns of findings.Timeline, times from the earliest span of each step; ``step`` is the one to show first."""

    spans: pd.DataFrame
    step: int | None
    note: str
    shown: tuple[int, ...] = ()
    stretches: pd.DataFrame | None = None

    def findings(self) -> list[Finding]:
        """Nothing: it is a picture."""
        return []

    def sections(self) -> list[Section]:
        """The timeline."""
        if not len(self.spans):
            return []
        title = "The whole trace" if self.step is None else f"Step {self.step}" if self.spans["step"].nunique() == 1 else "Steps"
        lead = "What ran when, on every stream, on one clock. Zoom in for single kernels. A collective starts when its rank arrives."
        chart = Timeline(title, self.spans, self.note, self.step, self.shown, self.stretches)
        return [Section("Timeline", lead, (chart,), name="timeline")]

    def json(self) -> dict[str, Any]:
        """Nothing: single pieces are not in the JSON."""
        return {}


@dataclass(frozen=True)
class _Kept:
    """``spans[step][rank]`` and ``window[step, rank]``; ``zero[step]`` [ns, job's clock] is the earliest span of a step."""

    spans: dict[int, dict[int, Spans]]
    window: dict[tuple[int, int], int]
    zero: dict[int, int]

    def shift(self, job: Job, step: int, rank: int) -> int:
        """What brings times [ns] of a window to the zero of its step."""
        return int(job.aligned(self.window[step, rank], -self.zero[step]))


def analyze(job: Job) -> StepTimeline:
    """Lay the steps of all ranks on one clock."""
    kept = _kept(job)
    if not kept.spans:
        return StepTimeline(pd.DataFrame({name: [] for name in COLUMNS}), None, "")
    votes = {step: len(ranks) for step, ranks in kept.spans.items()}
    first = max(votes, key=lambda step: (votes[step], step))
    shown = _chosen(job, sorted(kept.spans[first]))
    spans = _frame(job, kept, first, set(shown))
    near = {step: {rank: each for rank, each in ranks.items() if rank in shown} for step, ranks in kept.spans.items()}
    shift = {(step, rank): kept.shift(job, step, rank) for step, ranks in near.items() for rank in ranks}
    places = stretches(job, kept.zero, near, shift)
    return StepTimeline(spans, known(first), _note(job, kept, first, shown), tuple(shown), places)


def _kept(job: Job) -> _Kept:
    spans: dict[int, dict[int, Spans]] = {}
    window: dict[tuple[int, int], int] = {}
    for rank, index, steps in job.reduced("timeline"):
        for each in steps or []:
            spans.setdefault(each.step, {})[rank] = each
            window[each.step, rank] = index
    zero = {
        step: min(int(job.aligned(window[step, rank], each.start.min())) for rank, each in ranks.items()) for step, ranks in spans.items()
    }
    return _Kept(dict(sorted(spans.items())), window, zero)


def _chosen(job: Job, ranks: list[int]) -> list[int]:
    if len(ranks) <= SHOWN_RANKS:
        return ranks
    caused = stragglers.analyze(job).caused_by_rank()
    order = sorted(ranks, key=lambda rank: (-caused.get(rank, 0), rank))
    half = SHOWN_RANKS // 2
    return sorted(order[:half] + order[-half:])


def _frame(job: Job, kept: _Kept, first: int, shown: set[int]) -> pd.DataFrame:
    """All spans: of ranks, their waits, and the critical path."""
    limit = _limits(kept, first, shown)
    codes = _Codes(), _Codes(), _Codes()
    parts: list[_Part] = []
    waiting, path = _lanes(waits(job, kept.zero), ("step", "rank")), _lanes(critical(job, kept.zero), ("step",))
    for step, ranks in kept.spans.items():
        for rank, spans in sorted(ranks.items()):
            parts.append(_of_rank(rank, spans.at_most(limit[step, rank]), kept.shift(job, step, rank), codes))
            if (step, rank) in waiting:
                parts.append(_plain(waiting[step, rank], f"rank {rank} · waits", "waiting", codes))
        if (step,) in path:
            parts.append(_plain(path[step,], "critical path", None, codes))
    columns: dict[str, Any] = {name: np.concatenate([part[name] for part in parts]) for name in COLUMNS}
    coded = dict(zip(("lane", "name", "category"), codes, strict=True))
    for name, texts in coded.items():
        columns[name] = pd.Categorical.from_codes(columns[name].astype(np.int64), pd.Index(texts.texts, dtype=object))
    return pd.DataFrame(columns)


def _lanes(frame: pd.DataFrame, keys: tuple[str, ...]) -> dict[tuple[int, ...], _Part]:
    """The columns of each step (and rank), in the order of the rows."""
    if not len(frame):
        return {}
    numbers = [frame[key].to_numpy(np.int64) for key in keys]
    order = np.lexsort(numbers[::-1])
    change = np.append(True, np.any([np.diff(number[order]) != 0 for number in numbers], axis=0))
    bounds = [*np.flatnonzero(change).tolist(), len(order)]
    columns = {str(name): frame[name].to_numpy()[order] for name in frame}
    return {
        tuple(int(number[order[low]]) for number in numbers): {name: column[low:high] for name, column in columns.items()}
        for low, high in pairwise(bounds)
    }


def _limits(kept: _Kept, first: int, shown: set[int]) -> dict[tuple[int, int], int]:
    """How many spans of each step and rank the page has room for."""
    kinds = {key: _share(key, first, shown) for key in kept.window}
    room = MOST_SPANS - KEPT * sum(kind is None for kind in kinds.values())
    wanted = sum(min(kind, len(kept.spans[step][rank].start)) for (step, rank), kind in kinds.items() if kind is not None)
    scale = min(1.0, room / wanted) if wanted else 1.0
    return {key: 2 * KEPT if kind is None else max(FEWEST, int(kind * scale)) for key, kind in kinds.items()}


def _share(key: tuple[int, int], first: int, shown: set[int]) -> int | None:
    """The most spans of a step and rank; None: all."""
    step, rank = key
    if rank in shown:
        return None if step == first else SHARES[0]
    return SHARES[1] if step == first else SHARES[2]


class _Codes:
    """Texts in the order in which they are first seen."""

    def __init__(self) -> None:
        self._code: dict[str, int] = {}

    def of(self, texts: Iterable[str]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The number of each text."""
        code = self._code
        return np.array([code.setdefault(text, len(code)) for text in texts], np.int64)

    @property
    def texts(self) -> list[str]:
        """All texts, by number."""
        return list(self._code)


def _of_rank(rank: int, spans: Spans, shift: int, codes: tuple[_Codes, _Codes, _Codes]) -> _Part:
    """Spans of one rank and step, ``shift`` [ns] later, lanes in the order of host, then device and stream."""
    lanes, names, categories = codes
    many = len(np.unique(spans.device[spans.device >= 0])) > 1
    host = (spans.device == HOST_LANE) & (spans.stream <= HOST_LANE)
    order = np.lexsort((spans.start, spans.stream, spans.device, ~host))
    place, lane = np.unique(np.stack([spans.device[order], spans.stream[order]]), axis=1, return_inverse=True)
    labels = lanes.of(_lane(rank, stream, device, many) for device, stream in place.T.tolist())
    return {
        "step": np.full(len(order), spans.step),
        "lane": labels[lane.reshape(-1)],
        "start_us": (spans.start[order] + shift) / NS_PER_US,
        "end_us": (spans.end[order] + shift) / NS_PER_US,
        "name": names.of(spans.names)[spans.name[order]],
        "category": categories.of(spans.categories)[spans.category[order]],
        "merged": spans.merged[order],
    }


def _plain(part: _Part, lane: str, category: str | None, codes: tuple[_Codes, _Codes, _Codes]) -> _Part:
    """Spans of one lane that are not merged; ``category`` where the part has none."""
    lanes, names, categories = codes
    count = len(part["step"])
    kinds = categories.of(part["category"]) if category is None else np.repeat(categories.of([category]), count)
    lane_is = np.repeat(lanes.of([lane]), count)
    return {**part, "lane": lane_is, "name": names.of(part["name"]), "category": kinds, "merged": np.ones(count, np.int64)}


def _lane(rank: int, stream: int, device: int, many: bool) -> str:
    if stream == HOST_LANE and device == HOST_LANE:
        return f"rank {rank} · host phases"
    if stream < HOST_LANE and device == HOST_LANE:
        level = stream - HOST_LANE + MOST_LEVELS
        return f"rank {rank} · annotations" + (f" {level + 1}" if level else "")
    where = f"device {device}, " if many and device >= 0 else ""
    return f"rank {rank} · {where}stream {stream}"


def _note(job: Job, kept: _Kept, first: int, shown: list[int]) -> str:
    parts, here = [], kept.spans[first]
    if len(shown) < len(here):
        parts.append(f"{len(shown)} of {len(here)} ranks are shown at first: those that cause the most and the least waiting.")
    other = sorted({rank for _, rank in kept.window} - set(here))
    if other:
        which = "" if first == NULL else f" {first}"
        parts.append(f"{'Rank' if len(other) == 1 else 'Ranks'} {listed(other)} did not record step{which}.")
    if not job.clock.aligned:
        parts.append("The clocks of the hosts could not be aligned: compare times within one host only.")
    if any((spans.merged > 1).any() for ranks in kept.spans.values() for spans in ranks.values()):
        parts.append("Short neighbours are merged into one span, which says how many it holds.")
    return " ".join(parts)
