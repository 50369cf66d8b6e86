"""Compiled: decimal text to scaled integers, exactly, never through a float.

Two ways to the same answer. What a trace is full of (a few digits, maybe a point and up to ``scale`` more) is read eight digits at once;
anything else (quotes, exponents, more digits, no number at all) digit by digit. See lex.py on ``text``, ``end`` and bounds: the eight bytes
of a load begin at ``end`` or one behind it at the latest, because a run of digits stops at the zero byte there.
"""

from __future__ import annotations

import numpy as np

from tracekit.compiled import Native, jit
from tracekit.readers.lex import (
    CLOSE_LIST,
    CLOSE_OBJECT,
    COMMA,
    COMPILED,
    QUOTE,
    end_of_string,
    end_of_value,
    load8,
    load64,
    lowest_bit64,
)

MINUS, PLUS, DOT, ZERO = (ord(c) for c in "-+.0")
UPPER_E, LOWER_E = ord("E"), ord("e")

_POWERS = np.array([10**n for n in range(20)], np.uint64)
#: Numbers of this many digits always fit in 64 bits.
_SAFE = 19
_TOP = np.uint64(1 << 63)
_NO_LIMIT, _NO_OVERFLOW = np.int64(1 << 40), np.int64(0)  # not plain ints: see scan.py
_LAST_TENTH = np.uint64(1844674407370955161)  # (2**64 - 1) // 10


@jit(**COMPILED)
def leading_digits(word: Native) -> Native:
    """How many of eight bytes (the first in the lowest bits) are digits before the first that is none, and their value.

    A byte's distance from '0' plus 0x76 sets its top bit when the distance is above 9. The sum of a byte above 0x89 carries into the byte
    after it, which is no harm: the first byte that is no digit is found in any case. The digits are moved up against the top of the word,
    zeros before them, and then joined in pairs: 8 of 1 digit to 4 of 2, 2 of 4, 1 of 8.
    """
    distance = word ^ np.uint64(0x3030303030303030)
    others = ((distance + np.uint64(0x7676767676767676)) | distance) & np.uint64(0x8080808080808080)
    count = np.int64(8)
    if others:
        count = lowest_bit64(others) >> 3
        distance = (distance << np.uint64(8)) << np.uint64(56 - 8 * count)
    pairs = ((distance & np.uint64(0x0F0F0F0F0F0F0F0F)) * np.uint64(10 * 256 + 1)) >> np.uint64(8)
    fours = ((pairs & np.uint64(0x00FF00FF00FF00FF)) * np.uint64(100 * 65536 + 1)) >> np.uint64(16)
    return count, ((fours & np.uint64(0x0000FFFF0000FFFF)) * np.uint64(10000 * 2**32 + 1)) >> np.uint64(32)


@jit(**COMPILED)
def number(text: Native, i: Native, end: Native, scale: Native) -> Native:
    """A decimal number, bare or in quotes, times 10**scale as an exact integer: (value, offset behind it, 1 if it is a number).

    Digits beyond the scale round half away from zero. scale 0: up to 64 bits without sign, as the bits of an int64; otherwise the result
    must fit in an int64. NaN, Infinity, null, other text and numbers that do not fit give 0 as the third value.
    """
    begin = i
    negative = load8(text, i) == MINUS
    if negative:
        i += 1
    first = i
    count, value = leading_digits(load64(text, i))
    i += count
    while count == 8 and i - first <= _SAFE:
        count, part = leading_digits(load64(text, i))
        value = value * _POWERS[count] + part
        i += count
    whole = i - first
    if whole == 0 or whole + scale > _SAFE:
        return number_by_digit(text, begin, end, scale)
    missing = scale
    if load8(text, i) == DOT:
        count, part = leading_digits(load64(text, i + 1))
        if count > scale:
            return number_by_digit(text, begin, end, scale)
        value = value * _POWERS[count] + part
        missing = scale - count
        i += 1 + count
    c = load8(text, i)
    if not (c == COMMA or c == CLOSE_OBJECT or c == CLOSE_LIST or c <= 32):
        return number_by_digit(text, begin, end, scale)
    value *= _POWERS[missing]
    if value >= _TOP:
        return number_by_digit(text, begin, end, scale)
    result = np.int64(value)
    return (-result if negative else result), i, 1


@jit(**COMPILED)
def number_by_digit(text: Native, i: Native, end: Native, scale: Native) -> Native:
    """``number``, whatever the text."""
    begin = i
    quoted = load8(text, i) == QUOTE
    if quoted:
        i += 1
    negative = load8(text, i) == MINUS
    if negative:
        i += 1
    unsigned = i
    value, i, whole, _, overflow = _digits(text, i, np.uint64(0), _NO_LIMIT, _NO_OVERFLOW)
    fraction = 0
    beyond = np.int64(0)
    if load8(text, i) == DOT:
        value, i, fraction, beyond, overflow = _digits(text, i + 1, value, scale, overflow)
    valid = whole > 0
    shift = scale - (fraction if fraction < scale else scale)
    if load8(text, i) == LOWER_E or load8(text, i) == UPPER_E:
        value, i, shift, beyond, overflow = _with_exponent(text, unsigned, scale)
    while shift > 0 and valid:
        if value > _LAST_TENTH:
            overflow = np.int64(1)
        value = value * np.uint64(10)
        shift -= 1
    if beyond >= 5:
        value += np.uint64(1)
        if value == np.uint64(0):
            overflow = np.int64(1)
    if overflow or (scale > 0 and value >= _TOP) or (negative and value > _TOP):
        valid = False
    if quoted:
        if load8(text, i) == QUOTE:
            i += 1
        else:
            j, _ = end_of_string(text, begin + 1, end)
            i = j + 1 if j < end else end
            valid = False
    else:
        c = load8(text, i)
        if not valid or not (c == COMMA or c == CLOSE_OBJECT or c == CLOSE_LIST or c <= 32):
            i = end_of_value(text, begin, end)
            valid = False
    result = np.int64(value)
    return (-result if negative else result), i, (1 if valid else 0)


@jit(**COMPILED)
def _digits(text: Native, i: Native, value: Native, limit: Native, used: Native) -> Native:
    """Append decimal digits to ``value``, at most ``limit``: (value, offset, digits seen, first digit beyond the limit, overflow)."""
    seen = 0
    beyond = np.int64(0)
    overflow = used
    while True:
        d = np.int64(load8(text, i)) - ZERO
        if d < 0 or d > 9:
            return value, i, seen, beyond, overflow
        if seen < limit:
            if value > _LAST_TENTH or (value == _LAST_TENTH and d > 5):
                overflow = 1
            value = value * np.uint64(10) + np.uint64(d)
        elif seen == limit:
            beyond = d
        seen += 1
        i += 1


@jit(**COMPILED)
def _with_exponent(text: Native, i: Native, scale: Native) -> Native:
    """The number at ``i`` (no sign) again, with its exponent: (value, offset, powers of ten to multiply by, rounding digit, overflow).

    Exact for mantissas of up to 18 digits; digits behind them count as zeros.
    """
    mantissa = np.uint64(0)
    point = 0  # digits behind the decimal point that are in the mantissa
    kept = 0
    dropped = 0  # whole digits that did not fit
    in_fraction = False
    while True:
        c = load8(text, i)
        if c == DOT and not in_fraction:
            in_fraction = True
        elif c >= ZERO and c <= ZERO + 9:
            if kept < 18:
                mantissa = mantissa * np.uint64(10) + np.uint64(c - ZERO)
                kept += 1 if mantissa else 0
                point += 1 if in_fraction else 0
            elif not in_fraction:
                dropped += 1
        else:
            break
        i += 1
    i += 1
    below = load8(text, i) == MINUS
    if below or load8(text, i) == PLUS:
        i += 1
    exponent = np.int64(0)
    while load8(text, i) >= ZERO and load8(text, i) <= ZERO + 9:
        if exponent < 10000:
            exponent = exponent * 10 + np.int64(load8(text, i)) - ZERO
        i += 1
    shift = (-exponent if below else exponent) - point + dropped + scale
    beyond = np.int64(0)
    while shift < 0 and (mantissa or beyond):
        beyond = np.int64(mantissa % np.uint64(10))
        mantissa //= np.uint64(10)
        shift += 1
    if shift < 0:
        shift = 0
    overflow = 1 if shift > 20 and mantissa else 0
    return mantissa, i, (shift if shift <= 20 else 0), beyond, overflow
