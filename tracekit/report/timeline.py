"""A ``Timeline`` packed for the page's own renderer: typed arrays in base64, drawn on a canvas, smooth with 100,000 spans."""

from __future__ import annotations

import re
from base64 import b64encode
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from tracekit.findings import Table, Timeline
from tracekit.report.palette import roles
from tracekit.report.text import encodable

#: More spans than this are not put into the page: the longest stay.
MAX_SPANS = 200_000
_LANE = re.compile(r"^(rank\s+\d+)[\s·:/|,–—-]*(.*)$", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True)
class TimelineData:
    """Spans sorted by lane, then by start; lane ``i`` has rows ``offsets[i]`` to ``offsets[i + 1]``.

    ``start`` [us] counts from the first span, ``duration`` [us]; ``name`` and ``category`` index the lists of the same name.
    ``lanes`` are (group, label): lanes of one rank share a group. ``left_out`` spans were too many.
    """

    start: npt.NDArray[np.float64]
    duration: npt.NDArray[np.float32]
    name: npt.NDArray[np.uint32]
    category: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]
    lanes: list[tuple[str, str]]
    names: list[str]
    categories: list[str]
    left_out: int

    def payload(self) -> dict[str, Any]:
        """What the page's script gets."""
        return {
            "start": _packed(self.start.astype("<f8")),
            "duration": _packed(self.duration.astype("<f4")),
            "name": _packed(self.name.astype("<u4")),
            "category": _packed(self.category),
            "offsets": self.offsets.tolist(),
            "lanes": [{"group": group, "label": label} for group, label in self.lanes],
            "names": self.names,
            "categories": [{"name": name, "role": role} for name, role in zip(self.categories, roles(self.categories), strict=True)],
        }


def timeline_data(chart: Timeline, max_spans: int = MAX_SPANS) -> TimelineData:
    """Spans of a chart, lanes in order of first appearance with the lanes of one rank together."""
    spans = _usable(chart.spans)
    left_out = max(0, len(spans) - max_spans)
    if left_out:
        longest = (spans["end_us"] - spans["start_us"]).nlargest(max_spans).index
        spans = spans.loc[longest.sort_values()]
    lane, lane_names = _coded(spans["lane"])
    name, names = _coded(spans["name"])
    category, categories = _coded(spans["category"])
    split = [_lane(text) for text in lane_names]
    groups = list(dict.fromkeys(group for group, _ in split))
    place = sorted(range(len(split)), key=lambda i: groups.index(split[i][0]))
    rank_of_lane = np.empty(len(split), np.int64)
    rank_of_lane[place] = np.arange(len(split))
    lane = rank_of_lane[lane]
    start = spans["start_us"].to_numpy(np.float64)
    duration = spans["end_us"].to_numpy(np.float64) - start
    start = start - start.min() if len(start) else start
    order = np.lexsort((-duration, start, lane))
    return TimelineData(
        start[order],
        duration[order].astype(np.float32),
        name[order].astype(np.uint32),
        np.minimum(category[order], 255).astype(np.uint8),
        np.searchsorted(lane[order], np.arange(len(split) + 1)),
        [split[i] for i in place],
        names,
        categories[:256],
        left_out,
    )


def by_name(chart: Timeline) -> Table:
    """The spans of a timeline summed by name: what to search for in the picture, and the picture's words for who cannot see it."""
    spans = _usable(chart.spans)
    (name, names), (category, categories) = _coded(spans["name"]), _coded(spans["category"])
    lengths = pd.DataFrame({"name": name, "category": category, "us": spans["end_us"].to_numpy() - spans["start_us"].to_numpy()})
    summed = lengths.groupby(["name", "category"], as_index=False, sort=False)["us"].agg(["count", "sum", "max"])
    summed = summed.sort_values("sum", ascending=False, kind="stable")
    summed["name"] = [names[code] for code in summed["name"]]
    summed["category"] = [categories[code] for code in summed["category"]]
    headings = {"name": "Name", "category": "Kind", "count": "Count", "sum": "Sum [us]", "max": "Longest [us]"}
    return Table("Spans by name", summed, headings)


def _usable(spans: pd.DataFrame) -> pd.DataFrame:
    """Spans with two ends in the right order."""
    keep = np.isfinite(spans["start_us"].to_numpy(np.float64)) & np.isfinite(spans["end_us"].to_numpy(np.float64))
    keep &= spans["end_us"].to_numpy() >= spans["start_us"].to_numpy()
    usable: pd.DataFrame = spans[keep]
    return usable


def _coded(column: pd.Series[Any]) -> tuple[npt.NDArray[np.int64], list[str]]:
    """A column of names as codes and their texts, each name looked at once."""
    codes, texts = pd.factorize(column, use_na_sentinel=False)
    return codes.astype(np.int64), [encodable(str(text)) for text in texts]


def _lane(text: str) -> tuple[str, str]:
    found = _LANE.match(text)
    return (found[1], found[2]) if found else (text, "")


def _packed(values: npt.NDArray[Any]) -> str:
    return b64encode(np.ascontiguousarray(values).tobytes()).decode("ascii")
