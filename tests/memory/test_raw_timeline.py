"""torch's raw memory timelines: rows of [time, action, signed bytes, category]."""

import gzip
import json

import numpy as np
import pytest

from tracekit.errors import InputError
from tracekit.memory.raw_timeline import of_rows
from tracekit.readers.memory_timeline import looks_like_timeline, read_timeline
from tracekit.readers.sources import Source

PARAMETER, OPTIMIZER, INPUT, TEMPORARY, ACTIVATION, GRADIENT, DETAIL, NONE = range(8)


def of(*rows):
    return of_rows(np.array(rows, np.int64).reshape(-1, 4), "cuda:0")


def test_rows_of_minus_one_are_what_was_there_before() -> None:
    found = of([-1, 1, 100, PARAMETER], [-1, 1, 20, NONE], [50, 2, 30, ACTIVATION], [60, 4, -30, ACTIVATION])
    assert (found.start, found.peak, found.peak_ns, found.end) == (120, 150, 50, 120)
    assert {name: amount for name, amount in found.categories.items() if amount} == {
        "parameters": 100,
        "activations": 30,
        "unattributed": 20,
    }


def test_a_move_to_another_category_is_no_memory_twice() -> None:
    found = of([-1, 1, 40, NONE], [10, 3, -40, NONE], [10, 3, 40, OPTIMIZER], [20, 2, 1, GRADIENT])
    assert (found.peak, found.peak_ns) == (41, 20)
    assert found.categories["optimizer_state"] == 40
    assert found.curve is not None
    assert found.curve.allocated.tolist() == [40, 40, 41]


def test_the_order_in_which_a_move_is_written_makes_no_peak() -> None:
    assert of([10, 2, 40, NONE], [20, 3, 40, OPTIMIZER], [20, 3, -40, NONE]).peak == 40


def test_what_the_autograd_engine_holds_is_temporary_and_unknown_categories_are_unattributed() -> None:
    found = of([1, 2, 5, DETAIL], [2, 2, 7, 99])
    assert (found.categories["temporaries"], found.categories["unattributed"]) == (5, 7)
    assert [(h.name, h.bytes) for h in found.holdings] == [("", 7), ("autograd detail", 5)]


def test_only_what_was_there_before() -> None:
    found = of([-1, 1, 100, PARAMETER])
    assert (found.start, found.peak, found.end, found.peak_ns) == (100, 100, 100, None)


def test_reading(tmp_path) -> None:
    path = tmp_path / "memory.raw.json.gz"
    path.write_bytes(gzip.compress(json.dumps([[-1, 1, 100, 0], [5, 2, 3, 4]]).encode()))
    source = Source(str(path), path.name, 0, 0)
    assert looks_like_timeline(source)
    assert read_timeline(source).tolist() == [[-1, 1, 100, 0], [5, 2, 3, 4]]


@pytest.mark.parametrize("text", ["[[1, 2, 3]]", "[[1, 2, 3, 4]", '[[1, 2, 3, "x"]]', "[[1, 2, 3, 99999999999999999999]]"])
def test_what_is_something_else_is_one_line(tmp_path, text: str) -> None:
    path = tmp_path / "memory.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"memory\.json is not a raw memory timeline") as refused:
        read_timeline(Source(str(path), path.name, 0, 0))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ['{"traceEvents": []}', "[]", "", "[[]]", '[{"ph": "X"}]'])
def test_what_does_not_begin_as_rows_is_none(tmp_path, text: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    assert not looks_like_timeline(Source(str(path), path.name, 0, 0))
