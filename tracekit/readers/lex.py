"""Compiled steps over JSON bytes: white space, strings, values.

Text is passed as the integer address of a buffer, offsets count from there: an array handed to a compiled function that is not inlined
costs atomic reference counts, which made the whole pass more than twice as slow.

Why nothing is read outside a buffer. Every function gets ``end``, the offset behind the last byte of text, and is only called on a buffer
that goes on for at least PAD zero bytes after ``end`` (``worker.padded`` and stream.py see to it). Loops read at offsets up to ``end``,
at most 32 bytes at once, so below ``end + 32``. A byte read at ``end`` is 0, which is no character that JSON has a use for: code that finds
it where it wants a quote or a colon knows that the text goes on in the next buffer. Offsets that are returned are at most ``end``. Nothing
here writes: the stores are for pool.py and scan.py, which argue for their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tracekit import compiled
from tracekit.compiled import Native, jit

#: Zero bytes that must follow the text of a buffer.
PAD = 128

#: How everything here is compiled. Only entry points are cached (entry.py): their machine code holds all that they call.
COMPILED: dict[str, Any] = {**compiled.OPTIONS, "cache": False}
INLINE: dict[str, Any] = {**COMPILED, "forceinline": True}

QUOTE, BACKSLASH, COMMA, COLON = (ord(c) for c in '"\\,:')
OPEN_OBJECT, CLOSE_OBJECT, OPEN_LIST, CLOSE_LIST = (ord(c) for c in "{}[]")

_BLOCK = ir.VectorType(ir.IntType(8), 32)


def _pointer(builder: Any, args: Any, bits: int, unit: int) -> Any:
    offset = builder.mul(args[1], ir.Constant(ir.IntType(64), unit))
    return builder.inttoptr(builder.add(args[0], offset), ir.IntType(bits).as_pointer())


def _loader(bits: int, returned: Any, unit: int = 1) -> Any:
    """A compiled unaligned load of ``bits`` at address + offset, which counts in ``unit`` bytes."""

    def typing(_context: Any, _address: Any, _offset: Any) -> Any:
        def code(_compiler: Any, builder: Any, _signature: Any, args: Any) -> Any:
            value = builder.load(_pointer(builder, args, bits, unit))
            value.align = 1
            return value

        return returned(types.intp, types.intp), code

    return intrinsic(typing)


def _storer(bits: int, stored: Any, unit: int = 1) -> Any:
    """A compiled unaligned store of ``bits`` at address + offset, which counts in ``unit`` bytes."""

    def typing(_context: Any, _address: Any, _offset: Any, _value: Any) -> Any:
        def code(compiler: Any, builder: Any, _signature: Any, args: Any) -> Any:
            builder.store(args[2], _pointer(builder, args, bits, unit)).align = 1
            return compiler.get_dummy_value()

        return types.none(types.intp, types.intp, stored), code

    return intrinsic(typing)


load8 = _loader(8, types.uint8)
load32 = _loader(32, types.int32)
load64 = _loader(64, types.uint64)
load_int64 = _loader(64, types.int64)
store8 = _storer(8, types.uint8)
store32 = _storer(32, types.int32)
store64 = _storer(64, types.uint64)
store_int64 = _storer(64, types.int64)
#: Word number n of a block of int64 words at an address: ``word(block, n)``, ``put(block, n, value)``.
word = _loader(64, types.int64, 8)
put = _storer(64, types.int64, 8)


def _masker(test: Callable[[Any, Any], Any]) -> Any:
    """A compiled test of 32 bytes at address + offset: bit i of the result belongs to byte i."""

    def typing(_context: Any, _address: Any, _offset: Any) -> Any:
        def code(_compiler: Any, builder: Any, _signature: Any, args: Any) -> Any:
            block = builder.load(builder.inttoptr(builder.add(args[0], args[1]), _BLOCK.as_pointer()))
            block.align = 1
            return builder.bitcast(test(builder, block), ir.IntType(32))

        return types.uint32(types.intp, types.intp), code

    return intrinsic(typing)


def _equal(builder: Any, block: Any, byte: int) -> Any:
    return builder.icmp_unsigned("==", block, ir.Constant(_BLOCK, [byte] * 32))


def _lower(builder: Any, block: Any) -> Any:
    """Maps [ and { to {, ] and } to }."""
    return builder.or_(block, ir.Constant(_BLOCK, [0x20] * 32))


def _is_quote_or_backslash(builder: Any, block: Any) -> Any:
    return builder.or_(_equal(builder, block, QUOTE), _equal(builder, block, BACKSLASH))


def _is_quote_or_bracket(builder: Any, block: Any) -> Any:
    lower = _lower(builder, block)
    bracket = builder.or_(_equal(builder, lower, OPEN_OBJECT), _equal(builder, lower, CLOSE_OBJECT))
    return builder.or_(_equal(builder, block, QUOTE), bracket)


def _is_space(builder: Any, block: Any) -> Any:
    return builder.icmp_unsigned("<=", block, ir.Constant(_BLOCK, [0x20] * 32))


def _is_not_space(builder: Any, block: Any) -> Any:
    return builder.icmp_unsigned(">", block, ir.Constant(_BLOCK, [0x20] * 32))


def _ends_a_word(builder: Any, block: Any) -> Any:
    closing = _equal(builder, _lower(builder, block), CLOSE_OBJECT)
    return builder.or_(builder.or_(_is_space(builder, block), closing), _equal(builder, block, COMMA))


quotes32 = _masker(_is_quote_or_backslash)
structure32 = _masker(_is_quote_or_bracket)
solid32 = _masker(_is_not_space)
word_end32 = _masker(_ends_a_word)


def _bit_finder(kind: Any) -> Any:
    def typing(_context: Any, _mask: Any) -> Any:
        def code(_compiler: Any, builder: Any, signature: Any, args: Any) -> Any:
            position = builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))
            return builder.zext(position, ir.IntType(64)) if signature.args[0].bitwidth < 64 else position

        return types.intp(kind), code

    return intrinsic(typing)


#: Place of the lowest bit that is set, of 32 and of 64 bits; 32 and 64 when there is none.
lowest_bit: Any = _bit_finder(types.uint32)
lowest_bit64: Any = _bit_finder(types.uint64)


@jit(**INLINE)
def skip_space(text: Native, i: Native, end: Native) -> Native:
    """Offset of the first byte above 0x20 at or after ``i``; ``end`` when there is none."""
    if i < end:
        if load8(text, i) > 32:
            return i
        if load8(text, i + 1) > 32:  # one space is the most frequent case; the byte at end is 0
            return i + 1
    return skip_blocks_of_space(text, i, end)


@jit(**COMPILED)
def skip_blocks_of_space(text: Native, i: Native, end: Native) -> Native:
    """``skip_space`` for indentation, 32 bytes at once."""
    while i < end:
        solid = solid32(text, i)
        if solid:
            i += lowest_bit(solid)
            return i if i < end else end
        i += 32
    return end


@jit(**COMPILED)
def end_of_string(text: Native, i: Native, end: Native) -> Native:
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


@jit(**COMPILED)
def end_of_value(text: Native, i: Native, end: Native) -> Native:
    """Offset behind the value that starts at ``i``; ``end`` when the value may go on after the buffer."""
    first = load8(text, i)
    if first == QUOTE:
        j, _ = end_of_string(text, i + 1, end)
        return j + 1 if j < end else end
    if first == OPEN_OBJECT or first == OPEN_LIST:
        return _end_of_nested(text, i, end)
    while i < end:
        found = word_end32(text, i)
        if found:
            i += lowest_bit(found)
            return i if i < end else end
        i += 32
    return end


@jit(**COMPILED)
def _end_of_nested(text: Native, i: Native, end: Native) -> Native:
    """``end_of_value`` for a list or an object: counts brackets, whatever their kind, outside of strings."""
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
