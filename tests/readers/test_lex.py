"""The compiled steps over bytes, one by one, against Python's own ways to the same answer."""

import json
import re
import string
from decimal import ROUND_HALF_UP, Decimal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracekit.readers import lex, numbers
from tracekit.readers.worker import padded

compiles = settings(deadline=None)  # the first call of each function takes its time
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4)
)


def call(function, text, *rest, at=0):
    buffer = padded(text if isinstance(text, bytes) else text.encode())
    return function(buffer.ctypes.data, at, len(buffer) - lex.PAD, *rest)


@compiles
@given(st.text(" \t\r\n", max_size=100), st.sampled_from(["x", "", "{"]))
def test_space_is_skipped_up_to_the_end(space, behind):
    assert call(lex.skip_space, space + behind) == len(space)


@compiles
@given(texts, texts)
def test_a_string_ends_at_its_quote(inside, behind):
    written = json.dumps(inside, ensure_ascii=False).encode()
    end, escaped = call(lex.end_of_string, written + behind.encode(), at=1)
    assert end == len(written) - 1
    assert bool(escaped) == (b"\\" in written)
    assert call(lex.end_of_string, written[:-1], at=1)[0] == len(written) - 1


@compiles
@given(values, st.sampled_from([None, 1]), st.sampled_from([",", "}", " ]", "\n"]))
def test_a_value_ends_where_json_says(value, indent, behind):
    written = json.dumps(value, indent=indent).encode()
    assert call(lex.end_of_value, written + behind.encode()) == len(written)


@compiles
@given(values)
def test_of_a_value_that_is_cut_off_the_end_is_the_end_of_the_text(value):
    written = json.dumps(value).encode()
    for cut in range(1, len(written)):
        assert call(lex.end_of_value, written[:cut]) == cut


@compiles
@given(st.binary(min_size=8, max_size=8) | st.text(string.digits + "./:-", min_size=8, max_size=8).map(str.encode))
def test_eight_bytes_hold_a_number_of_digits_at_once(raw):
    digits = re.match(rb"\d*", raw).group()
    count, value = numbers.leading_digits(np.uint64(int.from_bytes(raw, "little")))
    assert (count, value) == (len(digits), int(digits or 0))


decimals = st.from_regex(r"\A-?(0|[1-9][0-9]{0,21})(\.[0-9]{1,12})?([eE][+-]?[0-9]{1,2})?\Z")


@compiles
@given(decimals, st.sampled_from([0, 3, 6]), st.booleans(), st.sampled_from([",", "}", " ", "\n  ]"]))
def test_a_number_is_exact(written, scale, quoted, behind):
    mantissa = re.sub(r"[eE].*", "", written)
    if written != mantissa and len(re.sub(r"\D", "", mantissa).lstrip("0")) > 18:
        return  # an exponent behind more than 18 digits: not promised
    text = f'"{written}"' if quoted else written
    value, behind_it, valid = call(numbers.number, text + behind, scale)
    exact = int((Decimal(written).scaleb(scale)).to_integral_value(ROUND_HALF_UP))
    assert behind_it == len(text)
    fits = -(2**63) <= exact < (2**64 if scale == 0 and not written.startswith("-") else 2**63)
    assert bool(valid) == fits
    if fits:
        assert int(value) == (exact if exact < 2**63 else exact - 2**64)


@compiles
@given(decimals, st.sampled_from([0, 3, 6]))
def test_the_quick_way_and_the_way_digit_by_digit_agree(written, scale):
    assert call(numbers.number, written + ",", scale) == call(numbers.number_by_digit, written + ",", scale)


NO_NUMBERS = ["NaN", "-Infinity", "null", "true", '"soon"', '""', "-", "1.2.3", "12a", '"7', "[1, 2]", '{"a": 1}', "1e400", "--1"]


@pytest.mark.parametrize("text", NO_NUMBERS)
def test_what_is_no_number_is_passed_over(text):
    _, behind, valid = call(numbers.number, text + ", 7", np.int64(3))
    assert not valid
    assert behind == (len(text) if text != '"7' else len('"7, 7'))
