"""Events of Chrome's JSON trace format as text, column by column: no Python object an event.

The format: "Trace Event Format" (Google, 2016). Times are microseconds with nanoseconds behind the point, sizes bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracekit.trace.events import Int64Array
from tracekit.units import NS_PER_US

#: Events that are made into text at one time.
ROWS = 100_000
Piece: TypeAlias = Any  # a text, or a column of texts (pyarrow has no types)


def quoted(text: str) -> str:
    """JSON text of a string, safe also where somebody pastes it into a page."""
    return json.dumps(text).replace("<", "\\u003c")


def names(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """JSON texts of a dictionary column, each word quoted once."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    words = pa.array([quoted(word) for word in array.dictionary.to_pylist()], pa.large_string())
    return words.take(array.indices)


def chosen(words: Sequence[str], codes: Int64Array) -> pa.Array:
    """One of ``words`` a row, as it is."""
    return pa.array(list(words), pa.large_string()).take(pa.array(codes))


def numbers(values: Int64Array) -> pa.Array:
    """Whole numbers."""
    return pc.cast(pa.array(values), pa.large_string())


def microseconds(ns: Int64Array) -> pa.Array:
    """``12.345`` for 12,345 ns; never negative."""
    whole = pc.cast(pa.array(ns // NS_PER_US), pa.large_string())
    rest = pc.cast(pa.array(ns % NS_PER_US), pa.large_string())
    return pc.binary_join_element_wise(whole, pc.utf8_lpad(rest, 3, "0"), _text("."))


def _text(text: str) -> Any:
    return pa.scalar(text, pa.large_string())


def joined(*pieces: Piece) -> Any:
    """Texts and columns put together, row by row."""
    return pc.binary_join_element_wise(*(_text(piece) if isinstance(piece, str) else piece for piece in pieces), _text(""))


def lines(*pieces: Piece) -> Iterator[bytes]:
    """Rows joined from texts and columns, as bytes, each ending with a comma and a new line."""
    count = max((len(piece) for piece in pieces if not isinstance(piece, str)), default=0)
    for begin in range(0, count, ROWS):
        part = [piece if isinstance(piece, str) else piece.slice(begin, ROWS) for piece in pieces]
        whole = joined(*part, ",\n")
        offsets = np.frombuffer(whole.buffers()[1], np.int64)[whole.offset : whole.offset + len(whole) + 1]
        yield whole.buffers()[2].to_pybytes()[offsets[0] : offsets[-1]]


def event(**values: Any) -> bytes:
    """One event of which there are few."""
    return json.dumps(values, separators=(",", ":")).replace("<", "\\u003c").encode() + b",\n"
