import numpy as np
import pandas as pd

from tracekit.findings import Table
from tracekit.report.cells import ColumnData, TableData
from tracekit.report.tables import table_data
from tracekit.units import NULL


def data(values: object, heading: str = "x", **options: object) -> TableData:
    return table_data(Table("t", pd.DataFrame({"x": values}), {"x": heading}, **options))


def column(values: object, heading: str = "x", **options: object) -> ColumnData:
    return data(values, heading, **options).columns[0]


def shown(found: ColumnData) -> list[str]:
    return [found.shown(row) for row in range(len(found.values))]


def test_numbers_of_a_column_have_the_same_digits() -> None:
    assert shown(column([1.0, 2.5, 12.25], "Time [us]")) == ["1.000", "2.500", "12.250"]
    assert shown(column([1234.5, 99999.0])) == ["1,234", "99,999"]
    assert shown(column([3, 1200])) == ["3", "1200"]


def test_bytes_and_shares_show_their_unit_and_sort_as_numbers() -> None:
    found = column([67108864, 10], "Full tensor [bytes]")
    assert (found.title, found.kind, shown(found)) == ("Full tensor", "bytes", ["67.1 MB", "10 B"])
    found = column([0.25, 1.0], "Hidden [share]")
    assert (found.title, found.values, shown(found)) == ("Hidden", [0.25, 1.0], ["25.0%", "100.0%"])


def test_what_was_not_recorded_is_a_dash_with_its_reason() -> None:
    found = column(np.array([5, NULL]), missing={"x": "the trace names no size"})
    assert (found.values, shown(found), found.missing) == ([5, None], ["5", "–"], "the trace names no size")
    assert column([1.5, np.nan]).missing == "not measured"
    assert shown(column([None, pd.NA, np.inf, 2.0])) == ["–", "–", "–", "2"]


def test_a_column_of_which_nothing_was_recorded_stays_a_column_of_numbers() -> None:
    found = column([np.nan, np.nan], "Wait [us]")
    assert (found.kind, found.title, shown(found)) == ("number", "Wait [us]", ["–", "–"])


def test_numbers_that_a_browser_would_round_are_text() -> None:
    found = column([2**53 + 1])
    assert (found.kind, found.values) == ("text", ["9007199254740993"])


def test_texts() -> None:
    assert column(pd.Categorical(["b", None, "a"])).values == ["b", None, "a"]
    assert column([True, False]).values == ["yes", "no"]
    assert column([[0, 1], (2,)]).values == ["0, 1", "2"]
    assert column(pd.Series(["half \ud83d"], dtype=object)).values == ["half \ufffd"]
    assert column(["a" * 100]).long
    assert not column(["all_reduce"]).long


def test_long_tables_are_cut_and_say_so() -> None:
    found = data(range(8000))
    assert (found.rows, found.total) == (5000, 8000)
    assert len(found.first()) == 25
    assert len(found.payload()["columns"][0]["values"]) == 5000


def test_an_empty_table() -> None:
    found = data([])
    assert (found.rows, found.first()) == (0, [])
