"""Traces in memory, and two readings of them held against each other."""

import io
import json

from tracekit.readers.kineto import read_trace
from tracekit.readers.sources import Source
from tracekit.trace.events import SIDE_COLUMNS


class Bytes(Source):
    """A source that is in memory."""

    def open(self):
        return io.BytesIO(self.data)


def source(data, name="made.json"):
    made = Bytes(name, name, len(data), 0)
    object.__setattr__(made, "data", data)
    return made


def read(data, **options):
    return read_trace(source(data if isinstance(data, bytes) else data.encode()), **options)


def texts(tables, codes):
    return [tables.text(int(c)) for c in codes]


def assert_same(got, want):
    """Every column equal; strings by text, JSON arguments by value, lanes by what they name."""
    assert len(got) == len(want)
    for column in ("ts", "dur", "category", "phase", "correlation", "external_id", "stream", "device"):
        mine, theirs = getattr(got, column), getattr(want, column)
        assert mine.dtype == theirs.dtype, column
        assert mine.tolist() == theirs.tolist(), column
    assert texts(got, got.name) == texts(want, want.name)
    assert [got.lanes[i] for i in got.lane] == [want.lanes[i] for i in want.lane]
    assert set(got.lanes) == set(want.lanes)
    for table, columns in SIDE_COLUMNS.items():
        assert got.side[table].rows.tolist() == want.side[table].rows.tolist(), table
        for column, kind in columns.items():
            mine, theirs = got.side[table].columns[column], want.side[table].columns[column]
            assert mine.dtype == theirs.dtype
            if kind == "str":
                assert texts(got, mine) == texts(want, theirs)
            elif kind == "json":
                assert [json.loads(x or "0") for x in texts(got, mine)] == [json.loads(x or "0") for x in texts(want, theirs)]
            else:
                assert mine.tolist() == theirs.tolist(), column
    assert got.metadata == dict(want.metadata)
    assert got.coverage.arrows == want.coverage.arrows
