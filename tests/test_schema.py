"""Tables of no rows: the right columns, and each caller's own."""

from __future__ import annotations

import pandas as pd

from tracekit.schema import Column, Schema

ROWS = Schema("rows", (Column("rank", "int64", "", "a rank"), Column("name", "str", "", "a name"), Column("parts", "object", "", "a list")))


def test_an_empty_table_has_the_columns_and_types_of_a_full_one() -> None:
    full = ROWS.frame({"rank": [1], "name": ["a"], "parts": [[1]]})
    for empty in (ROWS.empty(), ROWS.frame({})):
        assert len(empty) == 0
        assert empty.dtypes.to_dict() == full.dtypes.to_dict()


def test_what_one_caller_does_to_an_empty_table_no_other_sees() -> None:
    mine = ROWS.empty()
    mine["more"] = pd.Series([], dtype="int64")
    mine.loc[0] = [3, "b", None, 4]
    mine.attrs["from"] = "here"
    theirs = ROWS.empty()
    assert list(theirs.columns) == ROWS.names
    assert len(theirs) == 0
    assert not theirs.attrs
