"""The shared mechanisms of the events table."""

import numpy as np

from tests.builder import Trace
from tests.oracle import tables


def test_each_distinct_string_is_asked_once():
    trace = Trace()
    for name in ("a", "b", "a", "a"):
        trace.operator(name, 0, 1)
    t = tables(trace.text())
    asked = []
    assert t.each_text(t.name, lambda text: asked.append(text) or text == "a").tolist() == [True, False, True, True]
    assert sorted(asked) == ["a", "b"]
    assert t.each_text(t.name, len, np.int64).tolist() == [1, 1, 1, 1]


def test_a_missing_string_is_empty_and_no_rows_ask_nothing():
    t = tables(Trace().text())
    assert t.each_text(np.zeros(2, np.int32), lambda text: text == "").tolist() == [True, True]
    assert t.each_text(np.empty(0, np.int32), lambda text: 1 / 0).tolist() == []
