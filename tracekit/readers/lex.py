"""Compiled steps over JSON bytes: white space, strings, values, numbers.

Buffers are passed as integer addresses: an array handed to a compiled function that is not inlined costs atomic reference
counts, which made the whole scan more than twice as slow.

Why nothing is read outside a buffer. Every function gets ``end``, the offset behind the last byte of text, and is only called
on a buffer that goes on for at least PAD zero bytes after ``end`` (stream.py and worker.padded allocate them so). Loops read at
offsets below ``end`` only, at most 32 bytes at once, so below ``end + 32``; the digit loops of ``number`` read one byte at a time
and stop at the first zero, which is at ``end`` at the latest. No function returns an offset beyond ``end + 1``. Nothing here
writes by itself: the stores are for pool.py, which argues for its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from tracekit.compiled import COMPILED

#: Zero bytes that must follow the text of a buffer.
PAD = 128

QUOTE, BACKSLASH, COMMA, COLON, MINUS, PLUS, DOT, ZERO = (ord(c) for c in '"\\,:-+.0')
OPEN_OBJECT, CLOSE_OBJECT, OPEN_LIST, CLOSE_LIST = (ord(c) for c in "{}[]")
UPPER_E, LOWER_E = ord("E"), ord("e")

_BLOCK = ir.VectorType(ir.IntType(8), 32)


def _loader(bits: int, returned: Any) -> Any:
    """A compiled unaligned load of ``bits`` at address + offset."""

    def typing(_context: Any, _address: Any, _offset: Any) -> Any:
        def code(_compiler: Any, builder: Any, _signature: Any, args: Any) -> Any:
            pointer = builder.inttoptr(builder.add(args[0], args[1]), ir.IntType(bits).as_pointer())
            value = builder.load(pointer)
            value.align = 1
            return value

        return returned(types.intp, types.intp), code

    return intrinsic(typing)


def _storer(bits: int, stored: Any) -> Any:
    """A compiled unaligned store of ``bits`` at address + offset."""

    def typing(_context: Any, _address: Any, _offset: Any, _value: Any) -> Any:
        def code(compiler: Any, builder: Any, _signature: Any, args: Any) -> Any:
            pointer = builder.inttoptr(builder.add(args[0], args[1]), ir.IntType(bits).as_pointer())
            builder.store(args[2], pointer).align = 1
            return compiler.get_dummy_value()

        return types.none(types.intp, types.intp, stored), code

    return intrinsic(typing)


load8 = _loader(8, types.uint8)
load32 = _loader(32, types.int32)
load64 = _loader(64, types.uint64)
load_int64 = _loader(64, types.int64)
store32 = _storer(32, types.int32)
store64 = _storer(64, types.uint64)
store_int64 = _storer(64, types.int64)


def _masker(test: Callable[[Any, Any], Any]) -> Any:
    """A compiled test of 32 bytes at address + offset: bit i of the result belongs to byte i."""

    def typing(_context: Any, _address: Any, _offset: Any) -> Any:
        def code(_compiler: Any, builder: Any, _signature: Any, args: Any) -> Any:
            block = builder.load(builder.inttoptr(builder.add(args[0], args[1]), _BLOCK.as_pointer()))
            block.align = 1
            return builder.bitcast(test(builder, block), ir.IntType(32))

        return types.uint32(types.intp, types.intp), code

    return intrinsic(typing)


def _all(byte: int) -> Any:
    return ir.Constant(_BLOCK, [byte] * 32)


def _is_quote_or_backslash(builder: Any, block: Any) -> Any:
    return builder.or_(builder.icmp_unsigned("==", block, _all(QUOTE)), builder.icmp_unsigned("==", block, _all(BACKSLASH)))


def _is_quote_or_bracket(builder: Any, block: Any) -> Any:
    lower = builder.or_(block, _all(0x20))  # maps [ and { to {, ] and } to }
    bracket = builder.or_(
        builder.icmp_unsigned("==", lower, _all(OPEN_OBJECT)), builder.icmp_unsigned("==", lower, _all(CLOSE_OBJECT))
    )
    return builder.or_(builder.icmp_unsigned("==", block, _all(QUOTE)), bracket)


def _is_not_space(builder: Any, block: Any) -> Any:
    return builder.icmp_unsigned(">", block, _all(0x20))


quotes32 = _masker(_is_quote_or_backslash)
structure32 = _masker(_is_quote_or_bracket)
solid32 = _masker(_is_not_space)


@intrinsic
def _lowest_bit(_context: Any, _mask: Any) -> Any:
    def code(_compiler: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.zext(builder.cttz(args[0], ir.Constant(ir.IntType(1), 0)), ir.IntType(64))

    return types.intp(types.uint32), code


lowest_bit: Any = _lowest_bit


@njit(inline="always", **COMPILED)
def skip_space(text, i, end):  # type: ignore[no-untyped-def]
    """Offset of the first byte above 0x20 at or after ``i``; ``end`` when there is none."""
    if i < end and load8(text, i) > 32:
        return i
    while i < end:
        solid = solid32(text, i)
        if solid:
            i += lowest_bit(solid)
            return i if i < end else end
        i += 32
    return end


@njit(**COMPILED)
def end_of_string(text, i, end):  # type: ignore[no-untyped-def]
    """From behind an opening quote to its closing quote: (offset, 1 if there were escapes); offset ``end`` when it is not there."""
    escaped = 0
    while i < end:
        found = quotes32(text, i)
        if found:
            j = i + lowest_bit(found)
            if j >= end:
                return end, escaped
            if load8(text, j) == QUOTE:
                return j, escaped
            escaped = 1
            i = j + 2
        else:
            i += 32
    return end, escaped


@njit(**COMPILED)
def end_of_value(text, i, end):  # type: ignore[no-untyped-def]
    """Offset behind the value that starts at ``i``; at least ``end`` when the value may go on after the buffer."""
    first = load8(text, i)
    if first == QUOTE:
        j, _ = end_of_string(text, i + 1, end)
        return j + 1 if j < end else end
    if first == OPEN_OBJECT or first == OPEN_LIST:
        depth = 0
        while i < end:
            found = structure32(text, i)
            advance = 32
            while found:
                k = lowest_bit(found)
                if i + k >= end:
                    return end
                found &= found - np.uint32(1)
                c = load8(text, i + k)
                if c == QUOTE:
                    j, _ = end_of_string(text, i + k + 1, end)
                    used = j + 1 - i
                    if used >= 32:
                        advance = used
                        found = np.uint32(0)
                    else:
                        found &= np.uint32(0xFFFFFFFF) << np.uint32(used)
                elif c == OPEN_OBJECT or c == OPEN_LIST:
                    depth += 1
                else:
                    depth -= 1
                    if depth == 0:
                        return i + k + 1
            i += advance
        return end
    while i < end:
        c = load8(text, i)
        if c == COMMA or c == CLOSE_OBJECT or c == CLOSE_LIST or c <= 32:
            return i
        i += 1
    return end


_LAST_TENTH = np.uint64(1844674407370955161)  # (2**64 - 1) // 10


@njit(**COMPILED)
def _digits(text, i, value, limit, used):  # type: ignore[no-untyped-def]
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


@njit(**COMPILED)
def number(text, i, end, scale):  # type: ignore[no-untyped-def]
    """A decimal number, bare or in quotes, times 10**scale as an exact integer: (value, offset behind it, 1 if it is a number).

    Digits beyond the scale round half away from zero. scale 0: up to 64 bits without sign, as the bits of an int64; otherwise
    the result must fit in an int64. NaN, Infinity, null, other text and numbers that do not fit give 0 as the third value.
    """
    begin = i
    quoted = load8(text, i) == QUOTE
    if quoted:
        i += 1
    negative = load8(text, i) == MINUS
    if negative:
        i += 1
    value, i, whole, _, overflow = _digits(text, i, np.uint64(0), 1 << 40, 0)
    fraction = 0
    beyond = np.int64(0)
    if load8(text, i) == DOT:
        value, i, fraction, beyond, overflow = _digits(text, i + 1, value, scale, overflow)
    valid = whole > 0
    shift = scale - (fraction if fraction < scale else scale)
    if load8(text, i) == LOWER_E or load8(text, i) == UPPER_E:
        value, i, shift, beyond, overflow = _with_exponent(text, begin + (1 if quoted else 0) + (1 if negative else 0), scale)
    while shift > 0 and valid:
        if value > _LAST_TENTH:
            overflow = 1
        value = value * np.uint64(10)
        shift -= 1
    if beyond >= 5:
        value += np.uint64(1)
    top = np.uint64(1) << np.uint64(63)
    if overflow or (scale > 0 and value >= top) or (negative and value > top):
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


@njit(**COMPILED)
def _with_exponent(text, i, scale):  # type: ignore[no-untyped-def]
    """The number at ``i`` (no sign) again, with its exponent: (value, offset, powers of ten to multiply by, rounding digit, overflow)."""
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
