"""The compiled part of the reader of snapshot pickles: one pass over the opcodes of protocols 0 to 5.

It knows the opcodes that build plain values, containers and memo references. What imports, calls or builds anything else (GLOBAL, REDUCE,
BUILD, INST, OBJ, NEWOBJ, EXT, persistent ids, buffers) stops it: nothing of the kind is ever carried out.
Opcodes: pickletools of the Python library. ``text`` and ``c``, the control block, are addresses.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from tracekit.readers import memory_snapshot_store as s
from tracekit.readers.lex import INLINE, load8, put, word
from tracekit.readers.memory_snapshot_pack import add, append, become, get, intern, kind_of, pair_of_numbers, set4, set_, set_items

#: Why the pass stopped. MORE: the opcode at POSITION goes on behind the text. ROOM: part SHORT needs SHORT_BY more elements.
DONE, MORE, ROOM, REFUSED, BROKEN, NOT_MINE = range(6)
#: Lines of protocol 0 and single values may not be longer than this.
LONGEST = 1 << 26
_MOST_MEMO_GAP = 1 << 16
_TAKEN = 64  # elements that any one opcode may add beside those it takes from the stack

#: Bytes of an opcode with its operand; LINE: it ends with its line; COUNTED + n: a length of n bytes follows; REFUSE, NONE_SUCH.
LINE, COUNTED, REFUSE, NONE_SUCH = -3, -10, -2, -1
_SIZES = {
    1: b"(.012Nad}el]st)u\x85\x86\x87\x88\x89\x8f\x90\x91\x94",
    2: b"Khq\x80",
    3: b"M",
    5: b"Jjr",
    9: b"G\x95",
    LINE: b"FILSVgp",
    COUNTED - 1: b"UC\x8a\x8c",
    COUNTED - 4: b"TXB\x8b",
    COUNTED - 8: b"\x8d\x8e",
    REFUSE: b"PQRbcio\x81\x82\x83\x84\x92\x93\x96\x97\x98",
}
_EXTENT = tuple(next((size for size, ops in _SIZES.items() if op in ops), NONE_SUCH) for op in range(256))
SIZES = np.array(_EXTENT, np.int8)


@njit(**INLINE)
def run(text, end, sizes, c):  # type: ignore[no-untyped-def]
    """Carry out opcodes from POSITION on; returns why it stopped. The value of the pickle is then on top of the stack.

    ``sizes``: address of SIZES.
    """
    while True:
        at = word(c, s.POSITION)
        if at >= end:
            return MORE
        if not _has_room(c):
            return ROOM
        op = np.int64(load8(text, at))
        size, status = _extent(text, at, end, np.int64(np.int8(load8(sizes, op))))
        if status == DONE:
            if op == 0x2E:
                return DONE if word(c, s.DEPTH) == 1 else BROKEN
            status = _value(text, op, at, size, c)
            if status == NOT_MINE:
                status = _shape(text, op, at, size, c)
        if status != DONE:
            return status
        put(c, s.POSITION, at + size)


@njit(**INLINE)
def _has_room(c):  # type: ignore[no-untyped-def]
    """Whether every part has room for what any one opcode may add; if not, SHORT and SHORT_BY tell what is missing."""
    marks = word(c, s.OPEN_MARKS)
    most = word(c, s.DEPTH) - (get(c, s.MARKS, marks - 1) if marks > 0 else 0) + _TAKEN
    for part in range(s.PAIRS_):
        if part != s.CHARACTERS_:
            need = most if part == s.ALL_WORDS or part == s.NODES_ or part == s.FRAMES_ else 4
            if word(c, s.ROOM + part) - word(c, part) < need:
                put(c, s.SHORT, part)
                put(c, s.SHORT_BY, need)
                return False
    return True


@njit(**INLINE)
def _extent(text, at, end, fixed):  # type: ignore[no-untyped-def]
    """(bytes of the opcode with its operand, DONE); the status MORE, BROKEN or REFUSED where there are none."""
    if fixed > 0:
        return fixed, (DONE if at + fixed <= end else MORE)
    if fixed == REFUSE:
        return 0, REFUSED
    if fixed == NONE_SUCH:
        return 0, BROKEN
    if fixed == LINE:
        stop = at + 1
        while stop < end and load8(text, stop) != 0x0A:
            stop += 1
        if stop - at > LONGEST:
            return 0, BROKEN
        return stop + 1 - at, (DONE if stop < end else MORE)
    width = COUNTED - fixed
    if at + 1 + width > end:
        return 0, MORE
    length = _unsigned(text, at + 1, width)
    if length < 0 or length > LONGEST:
        return 0, BROKEN
    return 1 + width + length, (DONE if at + 1 + width + length <= end else MORE)


@njit(**INLINE)
def _value(text, op, at, size, c):  # type: ignore[no-untyped-def]
    """Opcodes that push a value without content, a number or a string."""
    if op == 0x68 or op == 0x6A or op == 0x67:
        place = _operand(text, op, at, size)
        if place < 0 or place >= word(c, s.MEMOS) or get(c, s.MEMO, place) == -1:
            return BROKEN
        return _push(c, get(c, s.MEMO, place))
    if op == 0x4B or op == 0x4D:
        return _push(c, _unsigned(text, at + 1, size - 1) << 4 | s.INT)
    if op == 0x4A:
        return _push(c, _signed(text, at + 1, 4) << 4 | s.INT)
    if op == 0x8A:
        return _push(c, _long(text, at + 2, size - 2))
    if op == 0x8B:
        return _push(c, _long(text, at + 5, size - 5))
    if op == 0x4E:
        return _push(c, np.int64(s.NONE))
    if op == 0x88 or op == 0x89:
        return _push(c, (0x89 - op) << 4 | s.BOOL)
    if op == 0x49 or op == 0x4C:
        return _push(c, _decimal(text, at + 1, at + size - 1))
    if op == 0x47 or op == 0x46:
        return _push(c, np.int64(s.FLOAT))
    if op == 0x42 or op == 0x43 or op == 0x8E:
        return _push(c, np.int64(s.BYTES))
    start, stop = at + 1, at + size
    if op == 0x8C or op == 0x55:
        start = at + 2
    elif op == 0x58 or op == 0x54:
        start = at + 5
    elif op == 0x8D:
        start = at + 9
    elif op == 0x56:
        stop = at + size - 1
    elif op == 0x53:
        start, stop = at + 2, max(at + 2, at + size - 2)
    else:
        return NOT_MINE
    if word(c, s.ROOM + s.CHARACTERS_) - word(c, s.CHARACTERS_) < stop - start:
        put(c, s.SHORT, s.CHARACTERS_)
        put(c, s.SHORT_BY, stop - start)
        return ROOM
    return _push(c, intern(text, start, stop - start, c) << 4 | s.TEXT)


@njit(**INLINE)
def _shape(text, op, at, size, c):  # type: ignore[no-untyped-def]
    """Opcodes that work on the stack, the memo and containers."""
    if op == 0x80 or op == 0x95:
        return DONE
    if op == 0x28:
        set_(c, s.MARKS, add(c, s.OPEN_MARKS, 1), word(c, s.DEPTH))
        return DONE
    if op == 0x7D or op == 0x5D or op == 0x29 or op == 0x8F:
        return _push(c, _container(c, s.DICT if op == 0x7D else s.LIST if op == 0x5D else s.TUPLE if op == 0x29 else s.SET))
    if op == 0x31 or op == 0x64 or op == 0x65 or op == 0x6C or op == 0x74 or op == 0x75 or op == 0x90 or op == 0x91:
        return _marked(c, op)
    marks, depth = word(c, s.OPEN_MARKS), word(c, s.DEPTH)
    floor = get(c, s.MARKS, marks - 1) if marks > 0 else np.int64(0)
    if depth <= floor:
        return BROKEN
    top = get(c, s.STACK_, depth - 1)
    if op == 0x94:
        return _remember(c, word(c, s.MEMOS), top)
    if op == 0x71 or op == 0x72 or op == 0x70:
        return _remember(c, _operand(text, op, at, size), top)
    if op == 0x32:
        return _push(c, top)
    if op == 0x30:
        put(c, s.DEPTH, depth - 1)
        return DONE
    if 0x85 <= op <= 0x87:
        return _collect(c, s.TUPLE, depth - (op - 0x84), floor)
    start = depth - (1 if op == 0x61 else 2)  # APPEND or SETITEM
    return _add_to(c, start, depth) if start - 1 >= floor else BROKEN


@njit(**INLINE)
def _marked(c, op):  # type: ignore[no-untyped-def]
    """Opcodes that take everything above the last mark."""
    marks, depth = word(c, s.OPEN_MARKS) - 1, word(c, s.DEPTH)
    if marks < 0:
        return BROKEN
    put(c, s.OPEN_MARKS, marks)
    start = get(c, s.MARKS, marks)
    floor = get(c, s.MARKS, marks - 1) if marks > 0 else np.int64(0)
    if start > depth:
        return BROKEN
    if op == 0x31:
        put(c, s.DEPTH, start)
        return DONE
    if op == 0x65 or op == 0x75 or op == 0x90:
        return _add_to(c, start, depth) if start - 1 >= floor else BROKEN
    return _collect(c, s.DICT if op == 0x64 else s.LIST if op == 0x6C else s.TUPLE if op == 0x74 else s.SET, start, floor)


@njit(**INLINE)
def _add_to(c, start, depth):  # type: ignore[no-untyped-def]
    """Put the words from ``start`` on into the container below them."""
    target = get(c, s.STACK_, start - 1)
    if target & 15 != s.CONTAINER:
        return BROKEN
    put(c, s.DEPTH, start)
    return _fill(c, target >> 4, start, depth)


@njit(**INLINE)
def _fill(c, container, start, depth):  # type: ignore[no-untyped-def]
    kind = kind_of(c, container)
    if kind == s.DICT or kind == s.RECORD or kind == s.FRAME:
        if (depth - start) % 2:
            return BROKEN
        set_items(c, container, start, depth)
    elif kind == s.PAIR:
        return BROKEN
    else:
        append(c, container, start, depth)
    return DONE


@njit(**INLINE)
def _collect(c, kind, start, floor):  # type: ignore[no-untyped-def]
    """A new container of everything from ``start`` on."""
    depth = word(c, s.DEPTH)
    if start < floor:
        return BROKEN
    value = _container(c, kind)
    pair = pair_of_numbers(c, start) if kind == s.TUPLE and depth - start == 2 else np.int64(-1)
    put(c, s.DEPTH, start)
    if pair >= 0:
        become(c, value >> 4, s.PAIR, pair)
    elif _fill(c, value >> 4, start, depth) != DONE:
        return BROKEN
    return _push(c, value)


@njit(**INLINE)
def _remember(c, place, value):  # type: ignore[no-untyped-def]
    known = word(c, s.MEMOS)
    if place < 0 or place > known + _MOST_MEMO_GAP:
        return BROKEN
    if place >= word(c, s.ROOM + s.MEMOS):
        put(c, s.SHORT, s.MEMOS)
        put(c, s.SHORT_BY, place + 1 - known)
        return ROOM
    for empty in range(known, place):
        set_(c, s.MEMO, empty, -1)
    set_(c, s.MEMO, place, value)
    put(c, s.MEMOS, max(known, place + 1))
    return DONE


@njit(**INLINE)
def _push(c, value):  # type: ignore[no-untyped-def]
    set_(c, s.STACK_, add(c, s.DEPTH, 1), value)
    return DONE


@njit(**INLINE)
def _container(c, kind):  # type: ignore[no-untyped-def]
    number = add(c, s.CONTAINERS, 1)
    become(c, number, kind, -1)
    set4(c, s.LAST, number, -1)
    return number << 4 | s.CONTAINER


@njit(**INLINE)
def _operand(text, op, at, size):  # type: ignore[no-untyped-def]
    """The number behind GET, PUT and their kin; -1 where it is none."""
    if op == 0x67 or op == 0x70:
        value = _decimal(text, at + 1, at + size - 1)
        return value >> 4 if value & 15 == s.INT else np.int64(-1)
    return _unsigned(text, at + 1, size - 1)


@njit(**INLINE)
def _unsigned(text, at, width):  # type: ignore[no-untyped-def]
    value = np.int64(0)
    for i in range(width):
        value |= np.int64(load8(text, at + i)) << (8 * i)
    return value


@njit(**INLINE)
def _signed(text, at, width):  # type: ignore[no-untyped-def]
    value = _unsigned(text, at, width)
    return value - (np.int64(1) << (8 * width)) if width < 8 and load8(text, at + width - 1) & 0x80 else value


@njit(**INLINE)
def _long(text, at, width):  # type: ignore[no-untyped-def]
    """Word of a little-endian two's complement number; HUGE where it does not fit in 60 bits."""
    if width == 0:
        return np.int64(s.INT)
    if width > 8:
        return np.int64(s.HUGE)
    return _number(_signed(text, at, width))


@njit(**INLINE)
def _number(value):  # type: ignore[no-untyped-def]
    return value << 4 | s.INT if -(1 << 59) <= value < 1 << 59 else np.int64(s.HUGE)


@njit(**INLINE)
def _decimal(text, start, stop):  # type: ignore[no-untyped-def]
    """Word of a decimal number, an L at its end included; HUGE where it is none or does not fit. 00 and 01 are False and True."""
    if stop > start and load8(text, stop - 1) == 0x4C:
        stop -= 1
    negative = stop > start and load8(text, start) == 0x2D
    at = start + 1 if negative else start
    if at >= stop or stop - at > 18:
        return np.int64(s.HUGE)
    value = np.int64(0)
    for i in range(at, stop):
        digit = np.int64(load8(text, i)) - 0x30
        if digit < 0 or digit > 9:
            return np.int64(s.HUGE)
        value = value * 10 + digit
    return _number(-value if negative else value)
