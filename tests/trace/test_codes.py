import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracekit.trace.codes import distinct, distinct_rows

NUMBERS = st.one_of(st.integers(-5, 5), st.integers(-(2**63), 2**63 - 1), st.integers(10**6, 10**6 + 9000))


@given(st.lists(NUMBERS, max_size=60))
def test_as_numpy_has_it(values):
    array = np.array(values, np.int64)
    found, place = distinct(array)
    expected, inverse = np.unique(array, return_inverse=True)
    assert (found.tolist(), place.tolist()) == (expected.tolist(), inverse.tolist())


@given(st.integers(1, 4).flatmap(lambda width: st.lists(st.tuples(*[NUMBERS] * width), max_size=40).map(lambda rows: (width, rows))))
def test_rows_as_numpy_has_them(case):
    width, rows = case
    table = np.array(rows, np.int64).reshape(len(rows), width)
    columns, place = distinct_rows(*table.T)
    expected, inverse = np.unique(table, axis=0, return_inverse=True) if rows else (table, np.empty(0, np.int64))
    assert np.stack(columns, axis=1).tolist() == expected.tolist()
    assert place.tolist() == inverse.reshape(-1).tolist()


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int32])
def test_small_types_do_not_overflow(kind):
    ends = np.array([np.iinfo(kind).max, np.iinfo(kind).min, np.iinfo(kind).max], kind)
    found, place = distinct(ends)
    assert found.tolist() == sorted({int(v) for v in ends})
    assert place.tolist() == [1, 0, 1]
