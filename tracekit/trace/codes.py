"""Which whole numbers there are, and which of them each entry is: as ``np.unique`` has it, without sorting where they are dense.

Codes of names, streams and lanes are small numbers, and there are many entries of each; a count finds them in one pass.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tracekit.trace.events import Int64Array

#: So many times the entries (and some more) the range of the numbers may be before sorting them is less work than counting.
_SPARSE, _ALWAYS = 4, 1 << 12


def distinct(values: npt.NDArray[Any]) -> tuple[Int64Array, Int64Array]:
    """(the numbers there are, ascending; for each entry which of them it is)."""
    low, span = _range(values)
    if not 0 < span <= _SPARSE * len(values) + _ALWAYS:
        found, place = np.unique(values, return_inverse=True)
        return found.astype(np.int64), place.reshape(-1).astype(np.int64)
    offset = values.astype(np.int64) - low
    there = np.zeros(span, np.bool_)
    there[offset] = True
    return np.flatnonzero(there).astype(np.int64) + low, (np.cumsum(there, dtype=np.int64) - 1)[offset]


def distinct_rows(*columns: npt.NDArray[Any]) -> tuple[list[Int64Array], Int64Array]:
    """(columns of the distinct rows, in lexicographic order; for each row which of them it is). Columns are of one length."""
    found, place = distinct(columns[0])
    parts = [found]
    for column in columns[1:]:
        values, code = distinct(column)
        if not len(values):
            return [*parts, *([values] * (len(columns) - len(parts)))], place
        both, place = distinct(place * len(values) + code)
        before, last = np.divmod(both, len(values))
        parts = [*(part[before] for part in parts), values[last]]
    return parts, place


def _range(values: npt.NDArray[Any]) -> tuple[int, int]:
    """(the least, how many numbers there are from it to the largest); (0, 0) for none."""
    if not len(values):
        return 0, 0
    low = int(values.min())
    return low, int(values.max()) - low + 1
