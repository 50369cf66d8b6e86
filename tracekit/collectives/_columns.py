"""The columns that matching looks at, as arrays, and the few ways in which it numbers them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from tracekit.collectives.kinds import VAGUE
from tracekit.trace.events import BoolArray, Int8Array, Int32Array, Int64Array
from tracekit.units import NULL
from tracekit.vocabulary import KINDS


@dataclass(frozen=True)
class Columns:
    """Operations of all ranks: one entry an operation.

    ``kind`` indexes KINDS. ``step`` and ``order`` follow the launch where it is known: the host runs the same program on every rank, while
    the device may lag behind it by more on one rank than on another.
    """

    rank: Int32Array
    group: Int32Array
    kind: Int8Array
    seq: Int64Array
    source: Int64Array
    destination: Int64Array
    start: Int64Array
    end: Int64Array
    launch: Int64Array
    step: Int64Array
    stream: Int32Array

    @property
    def order(self) -> Int64Array:
        """When the operation was called; its start where no call is recorded."""
        return np.where(self.launch != NULL, self.launch, self.start)

    def of_kind(self, *names: str) -> BoolArray:
        """Whether each operation is of one of these kinds."""
        found: BoolArray = np.isin(self.kind, [KINDS.index(name) for name in names])
        return found

    @property
    def certain(self) -> BoolArray:
        """Whether the kind of each operation is known for sure."""
        return ~self.of_kind(*VAGUE)


def columns_of(operations: pd.DataFrame) -> Columns:
    """The arrays of a table of operations; its launch columns may be absent."""
    nothing = np.full(len(operations), NULL, np.int64)

    def column(name: str) -> Any:
        return operations[name].to_numpy() if name in operations else nothing

    launch, own_step = column("launch_ns"), column("step_number")
    called_in = column("launch_step_number") if "launch_step_number" in operations else own_step
    kinds = pd.Categorical(operations["kind"])
    code = np.array([KINDS.index(k) if k in KINDS else KINDS.index("unknown") for k in kinds.categories.astype(str)] + [len(KINDS) - 1])
    return Columns(
        rank=column("rank"),
        group=column("group"),
        kind=code[kinds.codes].astype(np.int8),
        seq=column("seq"),
        source=column("source_rank"),
        destination=column("destination_rank"),
        start=column("start_ns"),
        end=column("end_ns"),
        launch=launch,
        step=np.where(launch != NULL, called_in, own_step),
        stream=column("stream"),
    )


def numbered(*columns: npt.NDArray[Any]) -> Int64Array:
    """A number from 0 up for each distinct combination of the columns."""
    result: Int64Array = pd.factorize(columns[0])[0].astype(np.int64)
    for column in columns[1:]:
        codes, values = pd.factorize(column)
        result = pd.factorize(result * max(len(values), 1) + codes)[0].astype(np.int64)
    return result


def nth_of(ids: Int64Array, *order: Int64Array) -> Int64Array:
    """Place of each entry among those of the same id, in the given order (the first key counts most); ties keep the table's order."""
    arranged = np.lexsort((*order[::-1], ids))
    ranked = ids[arranged]
    opens = np.append(True, ranked[1:] != ranked[:-1]) if len(ids) else np.empty(0, np.bool_)
    first = np.maximum.accumulate(np.where(opens, np.arange(len(ids)), 0))
    result = np.empty(len(ids), np.int64)
    result[arranged] = np.arange(len(ids)) - first
    return result


def extremes(ids: Int64Array, values: npt.NDArray[Any], chosen: BoolArray | None = None) -> tuple[Int64Array, Int64Array]:
    """(smallest, largest) chosen value of each id; where none is chosen the smallest is greater than the largest."""
    count = int(ids.max(initial=-1)) + 1
    least, most = np.full(count, np.iinfo(np.int64).max), np.full(count, NULL)
    if chosen is not None:
        ids, values = ids[chosen], values[chosen]
    np.minimum.at(least, ids, values)
    np.maximum.at(most, ids, values)
    return least, most


def distinct_of(ids: Int64Array, *values: npt.NDArray[Any]) -> Int64Array:
    """How many different values each id has."""
    pair = numbered(ids, *values)
    _, first = np.unique(pair, return_index=True)
    return np.bincount(ids[first], minlength=int(ids.max(initial=-1)) + 1).astype(np.int64)
