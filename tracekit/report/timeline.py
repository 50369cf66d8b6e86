"""A ``Timeline`` packed for the page's own renderer: a step is one packed text, opened when it is shown, drawn on a canvas."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from tracekit.findings import Table, Timeline
from tracekit.report.packing import packed
from tracekit.report.palette import roles
from tracekit.report.text import encodable
from tracekit.units import NS_PER_US, NULL

#: More spans than this are not put into the page: the longest stay.
MAX_SPANS = 400_000
_LANE = re.compile(r"^(rank\s+\d+|findings)[\s·:/|,–—-]*(.*)$", re.DOTALL | re.IGNORECASE)
#: Groups of lanes that stand above the ranks, in this order.
_ABOVE = ("findings", "critical path")
_TICKS = 2**32 - 1
#: Lanes of a rank that are no work of it.
WAITS = "waits"


@dataclass(frozen=True)
class StepData:
    """Spans of one step, sorted by lane, then by start; lane ``i`` has rows ``offsets[i]`` to ``offsets[i + 1]``.

    ``start`` and ``duration`` [ns] count from the first span; ``name`` and ``category`` index the lists of the whole timeline; ``merged``
    counts the pieces in a span. ``lanes`` are (group, label): lanes of one rank share a group.
    """

    number: int
    start: npt.NDArray[np.int64]
    duration: npt.NDArray[np.int64]
    name: npt.NDArray[np.int64]
    category: npt.NDArray[np.int64]
    merged: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    lanes: list[tuple[str, str]]

    def payload(self) -> dict[str, Any]:
        """What the page's script gets: five columns of 32 bits, start as the step from the span before; bytes of one place together."""
        tick = max(1, -(-int((self.start + self.duration).max(initial=0)) // _TICKS))
        start = np.diff(self.start // tick, prepend=0)
        columns = (start, self.duration // tick, self.name, self.category, np.minimum(self.merged, _TICKS))
        words = np.stack([column.astype("<i8").astype("<u4") for column in columns])
        content = words.view(np.uint8).reshape(len(columns), -1, 4).transpose(0, 2, 1).tobytes()
        return {
            "label": "The whole trace" if self.number == NULL else f"Step {self.number}",
            "tick_us": tick / NS_PER_US,
            "spans": len(self.start),
            "packed": packed(content),
            "offsets": self.offsets.tolist(),
            "lanes": [{"group": group, "label": label} for group, label in self.lanes],
        }


@dataclass(frozen=True)
class TimelineData:
    """All steps of a timeline. ``left_out`` spans were too many. ``findings``: (number from 1, step's index, start_us, end_us, rank)."""

    steps: list[StepData]
    names: list[str]
    categories: list[str]
    left_out: int
    first: int
    shown: list[int]
    findings: list[tuple[int, int, float, float, int]]

    @property
    def spans(self) -> int:
        """How many there are."""
        return sum(len(step.start) for step in self.steps)

    def payload(self) -> dict[str, Any]:
        """What the page's script gets."""
        return {
            "steps": [step.payload() for step in self.steps],
            "first": self.first,
            "shown": self.shown,
            "names": self.names,
            "categories": [{"name": name, "role": role} for name, role in zip(self.categories, roles(self.categories), strict=True)],
            "findings": self.findings,
        }


def timeline_data(chart: Timeline, findings: Sequence[Mapping[str, Any]] = (), max_spans: int = MAX_SPANS) -> TimelineData:
    """Spans of a chart by step; findings that can be seen in it have lanes of their own."""
    spans = _usable(chart.spans)
    left_out = max(0, len(spans) - max_spans)
    if left_out:
        longest = (spans["end_us"] - spans["start_us"]).nlargest(max_spans).index
        spans = spans.loc[longest.sort_values()]
    seen = _seen(chart, findings)
    marks = pd.DataFrame(
        [(step, f"findings · {number}", start, end, findings[number - 1]["text"], "finding", 1) for number, step, start, end, _ in seen],
        columns=["step", "lane", "start_us", "end_us", "name", "category", "merged"],
    )
    lane, lanes = _joined(marks["lane"], spans["lane"])
    name, names = _joined(marks["name"], spans["name"])
    category, categories = _joined(marks["category"], spans["category"])
    step, merged = (np.concatenate([marks[key].to_numpy(np.int64), spans[key].to_numpy(np.int64)]) for key in ("step", "merged"))
    start, end = (np.concatenate([marks[key].to_numpy(np.float64), spans[key].to_numpy(np.float64)]) for key in ("start_us", "end_us"))
    codes = (lane, name, category, merged)
    split = [_lane(text) for text in lanes]
    numbers = np.unique(step).tolist()
    steps = [_step(int(number), np.flatnonzero(step == number), split, codes, (start, end)) for number in numbers]
    index = {number: place for place, number in enumerate(numbers)}
    first = index.get(NULL if chart.first is None else chart.first, len(steps) - 1)
    found = [(number, index[at], low, high, rank) for number, at, low, high, rank in seen]
    return TimelineData(steps, names, categories, left_out, max(0, first), [int(rank) for rank in chart.shown], found)


def _step(number: int, rows: npt.NDArray[np.int64], split: list[tuple[str, str]], codes: tuple[npt.NDArray[Any], ...],
          times: tuple[npt.NDArray[Any], npt.NDArray[Any]]) -> StepData:  # fmt: skip
    """The spans ``rows`` of one step."""
    lane, name, category, merged = (column[rows] for column in codes)
    start, end = (np.rint(column[rows] * NS_PER_US).astype(np.int64) for column in times)
    there = np.unique(lane)
    _, first = np.unique(lane, return_index=True)
    by_sight = there[np.argsort(first, kind="stable")].tolist()
    groups = list(dict.fromkeys(split[code][0] for code in by_sight))
    groups.sort(key=lambda group: _ABOVE.index(group) if group in _ABOVE else len(_ABOVE))
    place = sorted(by_sight, key=lambda code: groups.index(split[code][0])) if len(groups) < 64 else _by_group(by_sight, split, groups)
    of_lane = np.zeros(len(split), np.int64)
    of_lane[place] = np.arange(len(place))
    lane = of_lane[lane]
    start, end = (start - start.min(), end - start.min()) if len(start) else (start, end)
    order = np.lexsort((start - end, start, lane))
    offsets = np.searchsorted(lane[order], np.arange(len(place) + 1))
    lanes = [split[code] for code in place]
    return StepData(number, start[order], (end - start)[order], name[order], category[order], merged[order], offsets, lanes)


def _by_group(codes: list[int], split: list[tuple[str, str]], groups: list[str]) -> list[int]:
    place = {group: number for number, group in enumerate(groups)}
    return sorted(codes, key=lambda code: place[split[code][0]])


def by_name(chart: Timeline) -> Table:
    """The spans of the step and the ranks shown first, summed by name: what to search for, and the picture in words.

    Waits and the critical path are no spans of work.
    """
    spans = _usable(chart.spans)
    title = "Spans by name"
    if spans["step"].nunique() > 1:
        spans, title = spans[spans["step"] == (NULL if chart.first is None else chart.first)], f"Spans by name, step {chart.first}"
    lane, lanes = _coded(spans["lane"])
    ranks = {f"rank {rank}" for rank in chart.shown}
    work = np.array([_work(*_lane(text), ranks) for text in lanes], np.bool_)
    spans = spans[work[lane]] if len(lanes) else spans
    (name, names), (category, categories) = _coded(spans["name"]), _coded(spans["category"])
    length = (spans["end_us"] - spans["start_us"]).to_numpy()
    lengths = pd.DataFrame({"name": name, "category": category, "us": length, "merged": spans["merged"].to_numpy()})
    grouped = lengths.groupby(["name", "category"], as_index=False, sort=False)
    summed = grouped.agg(count=("merged", "sum"), sum=("us", "sum"), max=("us", "max"))
    summed = summed.sort_values("sum", ascending=False, kind="stable")
    summed["name"] = [names[code] for code in summed["name"]]
    summed["category"] = [categories[code] for code in summed["category"]]
    headings = {"name": "Name", "category": "Kind", "count": "Count", "sum": "Sum [us]", "max": "Longest [us]"}
    return Table(title, summed, headings)


def _work(group: str, label: str, ranks: set[str]) -> bool:
    return group not in _ABOVE and label != WAITS and (not ranks or group in ranks)


#: Where a finding of an analysis can be seen: kinds of stretches, the first that there are.
_SEEN = {
    "stragglers": ("late", "message"),
    "pipeline": ("message", "late", "idle"),
    "links": ("transfer",),
    "collectives": ("transfer",),
    "overlap": ("exposed",),
    "idle": ("idle",),
    "breakdown": ("idle",),
    "experts": ("late",),
}
#: Findings with lanes, and stretches of each and a step.
_LANES, _STRETCHES = 9, 3


def _seen(chart: Timeline, findings: Sequence[Mapping[str, Any]]) -> list[tuple[int, int, float, float, int]]:
    """(number of the finding from 1, step, start_us, end_us, rank or -1) of the longest places of each step."""
    if chart.stretches is None or not len(chart.stretches):
        return []
    found: list[tuple[int, int, float, float, int]] = []
    for number, finding in enumerate(findings[:_LANES], 1):
        own = _of_finding(chart.stretches, finding).groupby("step", sort=False).head(_STRETCHES)
        rows = zip(*(own[key].tolist() for key in ("step", "start_us", "end_us", "rank")), strict=True)
        found += [(number, int(step), max(0.0, low), high, int(rank)) for step, low, high, rank in rows]
    return found


def _of_finding(stretches: pd.DataFrame, finding: Mapping[str, Any]) -> pd.DataFrame:
    """The stretches of a finding by its kind and what it is about."""
    subject = finding.get("subject") or {}
    for kind in _SEEN.get(str(finding["id"]).partition(".")[0], ()):
        own = stretches[stretches["kind"] == kind]
        if subject.get("ranks"):
            own = own[own["rank"].isin(subject["ranks"]) | (own["rank"] < 0)]
        if subject.get("group"):
            own = own[(own["group"] == subject["group"]) | (own["group"] == "")]
        if subject.get("axis") and kind != "late":
            own = own[own["axis"] == subject["axis"]]
        if len(own):
            return own
    return stretches.iloc[:0]


def _usable(spans: pd.DataFrame) -> pd.DataFrame:
    """Spans with two ends in the right order, with a step and a count of pieces each."""
    keep = np.isfinite(spans["start_us"].to_numpy(np.float64)) & np.isfinite(spans["end_us"].to_numpy(np.float64))
    keep &= spans["end_us"].to_numpy() >= spans["start_us"].to_numpy()
    usable: pd.DataFrame = spans[keep]
    absent = {key: value for key, value in (("step", NULL), ("merged", 1)) if key not in usable}
    return usable.assign(**absent)


def _joined(above: pd.Series[Any], below: pd.Series[Any]) -> tuple[npt.NDArray[np.int64], list[str]]:
    """Two columns of names one after the other, as codes and their texts."""
    (a, first), (b, second) = _coded(above), _coded(below)
    texts = dict.fromkeys([*first, *second])
    place = {text: code for code, text in enumerate(texts)}
    coded = [np.array([place[text] for text in own], np.int64)[code] if len(code) else code for code, own in ((a, first), (b, second))]
    return np.concatenate(coded), list(texts)


def _coded(column: pd.Series[Any]) -> tuple[npt.NDArray[np.int64], list[str]]:
    """A column of names as codes and their texts, each name looked at once."""
    if isinstance(column.dtype, pd.CategoricalDtype):
        codes, texts = column.cat.codes.to_numpy(), column.cat.categories
    else:
        codes, texts = pd.factorize(column, use_na_sentinel=False)
    return codes.astype(np.int64), [encodable(str(text)) for text in texts]


def _lane(text: str) -> tuple[str, str]:
    found = _LANE.match(text)
    return (found[1], found[2]) if found else (text, "")
