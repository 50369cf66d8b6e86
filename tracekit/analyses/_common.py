"""What several analyses share: the steps of a window, the joined operations of a window, names, integers on their way out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pandas as pd

from tracekit.job.activity import Window
from tracekit.job.model import Job
from tracekit.schema import Column, Schema
from tracekit.trace.events import Int64Array, RankTables
from tracekit.trace.steps import FAR_OFF, StepTimes, step_times
from tracekit.units import NS_PER_US, NULL

R = TypeVar("R")

#: How an axis that is not known is called wherever it leaves tracekit.
UNKNOWN_AXIS = "unknown"


#: The first columns of every table with one row a rank and step.
STEP_COLUMNS = (
    Column("rank", "int32", "", "global rank", "Rank", "rank"),
    Column("window", "int32", "", "index into job.windows"),
    Column(
        "step", "int64", "", "number of the step; without marks the whole window counts as one", "Step", "step", "the trace marks no steps"
    ),
    Column("step_ns", "int64", "ns", "length of the step on the host's clock"),
)
#: Why a sum over a step is missing.
CUT = "the trace of this rank is truncated, or work of the step was lost"


def once(analyze: Callable[[Job], R]) -> Callable[[Job], R]:
    """``analyze`` of an analysis that others build on: it works once a job, and whoever asks again gets the same result."""

    @wraps(analyze)
    def held(job: Job) -> R:
        name = analyze.__module__
        if name not in job.held:
            job.held[name] = analyze(job)
        result: R = job.held[name]
        return result

    return held


def whole(window: Window) -> bool:
    """False for a file that ends in the middle: what its steps lack cannot be told, so no sum over a step of it is given."""
    return window.coverage.status != "truncated"


def by_step(job: Job, analysis: str) -> Iterator[tuple[int, Window, StepTimes, Any]]:
    """(window index, window, its steps, what reduce() returned) of each window in which the analysis found device work."""
    for _, index, reduced in job.reduced(analysis):
        if reduced is not None:
            window = job.windows[index]
            yield index, window, step_times(window.steps, window.span), reduced


def step_frame(schema: Schema, job: Job, analysis: str, columns: Sequence[str]) -> pd.DataFrame:
    """One row a rank and step: STEP_COLUMNS, then ``columns``, attributes of what reduce() returned (one entry a step).

    Sums of truncated windows are NULL, and those of steps of which work was lost.
    """
    data: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in schema.names}
    for index, window, times, reduced in by_step(job, analysis):
        size = len(times)
        data["rank"].append(np.full(size, window.rank, np.int32))
        data["window"].append(np.full(size, index, np.int32))
        data["step"].append(times.number)
        data["step_ns"].append(times.end - times.start)
        for name in columns:
            values = getattr(reduced, name) if whole(window) else np.full(size, NULL, np.int64)
            data[name].append(np.where(window.partial, NULL, values) if window.partial.any() else values)
    if not data["rank"]:
        return schema.empty()
    return schema.frame({name: np.concatenate(parts) for name, parts in data.items()})


def measured(frame: pd.DataFrame, column: str) -> pd.DataFrame:
    """The rows in which a column is known."""
    return frame[frame[column] != NULL]


class WindowOperations:
    """Rows of ``job.operations`` of each window, in the order of its local operations."""

    def __init__(self, job: Job) -> None:
        window = job.operations["window"].to_numpy()
        self._order = np.lexsort((job.operations["local"].to_numpy(), window))
        self._bounds = np.searchsorted(window[self._order], np.arange(len(job.windows) + 1))

    def rows(self, window: int) -> Int64Array:
        """Rows of one window: entry i belongs to its local operation i."""
        return self._order[self._bounds[window] : self._bounds[window + 1]].astype(np.int64)


def codes(column: pd.Series[Any]) -> tuple[npt.NDArray[np.int64], list[str]]:
    """A text column as (codes, texts)."""
    found = pd.Categorical(column)
    return found.codes.astype(np.int64), [str(text) for text in found.categories]


def axes(job: Job) -> tuple[npt.NDArray[np.int64], list[str]]:
    """The axis of each row of ``job.operations`` as (codes, names), the empty name spelled ``unknown``."""
    found, texts = codes(job.operations["axis"])
    names = [text or UNKNOWN_AXIS for text in texts]
    distinct = list(dict.fromkeys(names))
    place = np.array([distinct.index(name) for name in names] or [0], np.int64)
    return place[found] if len(found) else found, distinct


def us_column(ns: pd.Series[Any] | Int64Array) -> npt.NDArray[np.float64]:
    """A column of nanoseconds as microseconds for a reader; NULL becomes NaN."""
    values = np.asarray(ns)
    return np.where(values == NULL, np.nan, values / NS_PER_US)


def mean_by_rank(frame: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Mean over the measured steps of each rank [ns], indexed by rank."""
    return measured(frame, columns[0]).groupby("rank")[list(columns)].mean()


def typical(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of the usual steps: of three steps or more, without those that take FAR_OFF times as long as the median step."""
    length = frame.groupby("step")["step_ns"].mean()
    if len(length) < 3:
        return frame
    return frame[frame["step"].isin(length.index[length <= FAR_OFF * length.median()])]


#: Of more ranks a table begins with those that matter; of fewer it is read by rank.
MANY_RANKS = 16


def worst_first(frame: pd.DataFrame, by: str) -> pd.DataFrame:
    """A table with a row a rank (and step) for a reader: of many ranks those with most of ``by`` first, what is not known last."""
    if frame["rank"].nunique() <= MANY_RANKS:
        return frame
    return frame.sort_values(by, ascending=False, kind="stable", key=lambda column: column.where(column != NULL, -1))


def rank_labels(ranks: Sequence[int] | pd.Index[Any]) -> list[str]:
    """``rank 3`` for each."""
    return [f"rank {rank}" for rank in ranks]


def a_step(frame: pd.DataFrame) -> str:
    """``a step``, or ``the recorded window`` where no step is marked."""
    return "a step" if len(frame) and bool((frame["step"] != NULL).any()) else "the recorded window"


def text_of(tables: RankTables, code: int) -> str:
    """The string of a code; halves of surrogate pairs, which no text column can hold, become U+FFFD."""
    return tables.text(code).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
