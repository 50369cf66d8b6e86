"""The compiled part of the reader of snapshot pickles: one pass over the opcodes of protocols 0 to 5.

It knows the opcodes that build plain values, containers and memo references. What imports, calls or builds anything else (GLOBAL, REDUCE,
BUILD, INST, OBJ, NEWOBJ, EXT, persistent ids, buffers) stops it: nothing of the kind is ever carried out.
Opcodes: pickletools of the Python library.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from tracekit.compiled import COMPILED
from tracekit.readers import memory_snapshot_store as s
from tracekit.readers.memory_snapshot_pack import append, intern, pair_of_numbers, set_items
from tracekit.readers.memory_snapshot_store import Store
from tracekit.trace.events import UInt8Array

#: Why the pass stopped. MORE: the opcode at C_POSITION goes on behind the text. ROOM: part C_SHORT needs C_OPERAND more elements.
DONE, MORE, ROOM, REFUSED, BROKEN = range(5)
#: Lines of protocol 0 and single values may not be longer than this.
LONGEST = 1 << 26
_MOST_MEMO_GAP = 1 << 16


@njit(**COMPILED)  # type: ignore[untyped-decorator]
def run(text: UInt8Array, end: int, store: Store) -> int:
    """Carry out opcodes from C_POSITION on; returns why it stopped. The value of the pickle is then on top of the stack."""
    count = store.count
    while True:
        at = count[s.C_POSITION]
        if at >= end:
            return MORE
        short = _room(store)
        if short >= 0:
            count[s.C_SHORT] = short
            return ROOM
        op = np.int64(text[at])
        size, status = _extent(text, at, end)
        if status != DONE:
            return status
        if op == 0x2E:
            return DONE if count[s.C_DEPTH] == 1 else BROKEN
        status = _value(text, op, at, size, store)
        if status == -1:
            status = _shape(text, op, at, size, store)
        if status != DONE:
            return status
        count[s.C_POSITION] = at + size


@njit(**COMPILED)  # type: ignore[untyped-decorator]
def _room(store: Store) -> int:
    """The part that is too small for what any one opcode may add, with the amount in C_OPERAND; -1 for none."""
    count = store.count
    waiting = count[s.C_DEPTH] - (store.marks[count[s.C_MARKS] - 1] if count[s.C_MARKS] > 0 else 0) + 64
    count[s.C_OPERAND] = waiting
    if len(store.stack) - count[s.C_DEPTH] < 4:
        return s.C_DEPTH
    if len(store.words) - count[s.C_WORDS] < waiting:
        return s.C_WORDS
    if len(store.nodes) - count[s.C_NODES] < waiting:
        return s.C_NODES
    if len(store.frames) - count[s.C_FRAMES] < waiting:
        return s.C_FRAMES
    for part, size in (
        (s.C_MARKS, len(store.marks)),
        (s.C_CONTAINERS, len(store.kind)),
        (s.C_RUNS, len(store.run_start)),
        (s.C_STRINGS, len(store.string_end)),
        (s.C_RECORDS, len(store.numbers)),
        (s.C_MEMO, len(store.memo)),
    ):
        if size - count[part] < 4:
            count[s.C_OPERAND] = 4
            return part
    return -1


@njit(**COMPILED)  # type: ignore[untyped-decorator]
def _extent(text: UInt8Array, at: int, end: int) -> tuple[int, int]:
    """(bytes of the opcode with its operand, DONE); the status MORE, BROKEN or REFUSED where there are none."""
    op = np.int64(text[at])
    fixed = _fixed(op)
    if fixed == -2:
        return 0, REFUSED
    if fixed >= 0:
        return fixed, (DONE if at + fixed <= end else MORE)
    if fixed == -3:
        stop = at + 1
        while stop < end and text[stop] != 0x0A:
            stop += 1
        if stop - at > LONGEST:
            return 0, BROKEN
        return stop + 1 - at, (DONE if stop < end else MORE)
    if fixed == -1:
        return 0, BROKEN
    width = -fixed - 10  # bytes of the length
    if at + 1 + width > end:
        return 0, MORE
    length = _unsigned(text, at + 1, width)
    if length < 0 or length > LONGEST:
        return 0, BROKEN
    return 1 + width + length, (DONE if at + 1 + width + length <= end else MORE)


@njit(**COMPILED)  # type: ignore[untyped-decorator]
def _fixed(op: int) -> int:
    """Bytes of an opcode of fixed size; -3 it ends with its line; -10 - n: a length of n bytes follows; -2 refused; -1 none at all."""
    if op in (0x28, 0x2E, 0x30, 0x31, 0x32, 0x4E, 0x61, 0x64, 0x7D, 0x65, 0x6C, 0x5D, 0x73, 0x74, 0x29, 0x75):
        return 1
    if op in (0x85, 0x86, 0x87, 0x88, 0x89, 0x8F, 0x90, 0x91, 0x94):
        return 1
    if op in (0x4B, 0x68, 0x71, 0x80):
        return 2
    if op == 0x4D:
        return 3
    if op in (0x4A, 0x6A, 0x72):
        return 5
    if op in (0x47, 0x95):
        return 9
    if op in (0x46, 0x49, 0x4C, 0x53, 0x56, 0x67, 0x70):
        return -3
    if op in (0x55, 0x43, 0x8A, 0x8C):
        return -11
    if op in (0x54, 0x58, 0x42, 0x8B):
        return -14
    if op in (0x8D, 0x8E):
        return -18
    if op in (0x50, 0x51, 0x52, 0x62, 0x63, 0x69, 0x6F, 0x81, 0x82, 0x83, 0x84, 0x92, 0x93, 0x96, 0x97, 0x98):
        return -2
    return -1


@njit(**COMPILED)  # type: ignore[untyped-decorator]
def _value(text: UInt8Array, op: int, at: int, size: int, store: Store) -> int:
    """Opcodes that push a value without content, a number or a string; -1 for any other opcode."""
    if op == 0x4E:
        return _push(store, s.NONE)
    if op == 0x88 or op == 0x89:
        return _push(store, (0x89 - op) << 4 | s.BOOL)
    if op == 0x4B or op == 0x4D:
        return _push(store, _unsigned(text, at + 1, size - 1) << 4 | s.INT)
    if op == 0x4A:
        return _push(store, _signed(text, at + 1, 4) << 4 | s.INT)
    if op == 0x8A or op == 0x8B:
        head = 2 if op == 0x8A else 5
        return _push(store, _long(text, at + head, size - head))
    if op == 0x49 or op == 0x4C:
        return _push(store, _decimal(text, at + 1, at + size - 1))
    if op == 0x47 or op == 0x46:
        return _push(store, s.FLOAT)
    if op in (0x42, 0x43, 0x8E):
        return _push(store, s.BYTES)
    start, stop = at, at
    if op == 0x8C or op == 0x55:
        start, stop = at + 2, at + size
    elif op == 0x58 or op == 0x54:
        start, stop = at + 5, at + size
    elif op == 0x8D:
        start, stop = at + 9, at + size
    elif op == 0x56:
        start, stop = at + 1, at + size - 1
    elif op == 0x53:
        start, stop = at + 2, max(at + 2, at + size - 2)
    else:
        return -1
    if len(store.characters) - store.count[s.C_CHARACTERS] < stop - start:
        store.count[s.C_SHORT], store.count[s.C_OPERAND] = s.C_CHARACTERS, stop - start
        return ROOM
    return _push(store, intern(text, start, stop, store) << 4 | s.TEXT)


@njit(**COMPILED)  # type: ignore[untyped-decorator]
def _shape(text: UInt8Array, op: int, at: int, size: int, store: Store) -> int:
    """Opcodes that work on the stack, the memo and containers."""
    count, stack, marks = store.count, store.stack, store.marks
    if op == 0x80 or op == 0x95:
        return DONE
    if op == 0x28:
        marks[count[s.C_MARKS]] = count[s.C_DEPTH]
        count[s.C_MARKS] += 1
        return DONE
    if op in (0x68, 0x6A, 0x67):
        place = _operand(text, op, at, size)
        if not 0 <= place < count[s.C_MEMO] or store.memo[place] == -1:
            return BROKEN
        return _push(store, store.memo[place])
    if op in (0x7D, 0x5D, 0x29, 0x8F):
        kind = s.DICT if op == 0x7D else s.LIST if op == 0x5D else s.TUPLE if op == 0x29 else s.SET
        return _push(store, _container(store, kind))
    floor = marks[count[s.C_MARKS] - 1] if count[s.C_MARKS] > 0 else 0
    if op in (0x31, 0x64, 0x65, 0x6C, 0x74, 0x75, 0x90, 0x91):
        return _marked(op, store)
    if count[s.C_DEPTH] <= floor:
        return BROKEN
    top = stack[count[s.C_DEPTH] - 1]
    if op == 0x94 or op == 0x71 or op == 0x72 or op == 0x70:
        return _remember(store, count[s.C_MEMO] if op == 0x94 else _operand(text, op, at, size), top)
    if op == 0x32:
        return _push(store, top)
    if op == 0x30:
        count[s.C_DEPTH] -= 1
        return DONE
    if 0x85 <= op <= 0x87:
        return _collect(store, s.TUPLE, count[s.C_DEPTH] - (op - 0x84), floor)
    if op == 0x61 or op == 0x73:
        start = count[s.C_DEPTH] - (1 if op == 0x61 else 2)
        if start - 1 < floor:
            return BROKEN
        return _add(store, start)
    return BROKEN


@njit(**COMPILED)  # type: ignore[untyped-decorator]
def _marked(op: int, store: Store) -> int:
    """Opcodes that take everything above the last mark."""
    count = store.count
    if count[s.C_MARKS] == 0:
        return BROKEN
    count[s.C_MARKS] -= 1
    start = store.marks[count[s.C_MARKS]]
    floor = store.marks[count[s.C_MARKS] - 1] if count[s.C_MARKS] > 0 else 0
    if start > count[s.C_DEPTH]:
        return BROKEN
    if op == 0x31:
        count[s.C_DEPTH] = start
        return DONE
    if op == 0x65 or op == 0x75 or op == 0x90:
        if start - 1 < floor:
            return BROKEN
        return _add(store, start)
    if op == 0x64:
        if (count[s.C_DEPTH] - start) % 2:
            return BROKEN
        top = count[s.C_DEPTH]
        number = _container(store, s.DICT)
        set_items(store, number >> 4, start, top)
        count[s.C_DEPTH] = start
        return _push(store, number)
    return _collect(store, s.LIST if op == 0x6C else s.TUPLE if op == 0x74 else s.SET, start, floor)


@njit(**COMPILED)  # type: ignore[untyped-decorator]
def _add(store: Store, start: int) -> int:
    """Put the words from ``start`` on into the container below them."""
    count = store.count
    target = store.stack[start - 1]
    if target & 15 != s.CONTAINER:
        return BROKEN
    kind = store.kind[target >> 4]
    if kind == s.DICT or kind == s.RECORD or kind == s.FRAME:
        if (count[s.C_DEPTH] - start) % 2:
            return BROKEN
        set_items(store, target >> 4, start, count[s.C_DEPTH])
    elif kind == s.TUPLE:
        return BROKEN
    else:
        append(store, target >> 4, start, count[s.C_DEPTH])
    count[s.C_DEPTH] = start
    return DONE


@njit(**COMPILED)  # type: ignore[untyped-decorator]
def _collect(store: Store, kind: int, start: int, floor: int) -> int:
    """A new list, tuple or set of everything from ``start`` on."""
    if start < floor:
        return BROKEN
    top = store.count[s.C_DEPTH]
    number = _container(store, kind)
    pair = pair_of_numbers(store, start) if kind == s.TUPLE and top - start == 2 else -1
    if pair >= 0:
        store.kind[number >> 4], store.first[number >> 4] = s.PAIR, pair
    else:
        append(store, number >> 4, start, top)
    store.count[s.C_DEPTH] = start
    return _push(store, number)


@njit(**COMPILED)  # type: ignore[untyped-decorator]
def _remember(store: Store, place: int, word: int) -> int:
    count = store.count
    if place < 0 or place > count[s.C_MEMO] + _MOST_MEMO_GAP:
        return BROKEN
    if place >= len(store.memo):
        count[s.C_SHORT], count[s.C_OPERAND] = s.C_MEMO, place + 1 - count[s.C_MEMO]
        return ROOM
    for empty in range(count[s.C_MEMO], place):
        store.memo[empty] = -1
    store.memo[place] = word
    count[s.C_MEMO] = max(count[s.C_MEMO], place + 1)
    return DONE


@njit(**COMPILED)  # type: ignore[untyped-decorator]
def _push(store: Store, word: int) -> int:
    store.stack[store.count[s.C_DEPTH]] = word
    store.count[s.C_DEPTH] += 1
    return DONE


@njit(**COMPILED)  # type: ignore[untyped-decorator]
def _container(store: Store, kind: int) -> int:
    number = store.count[s.C_CONTAINERS]
    store.kind[number] = kind
    store.first[number] = store.last[number] = -1
    store.count[s.C_CONTAINERS] += 1
    return number << 4 | s.CONTAINER


@njit(**COMPILED)  # type: ignore[untyped-decorator]
def _operand(text: UInt8Array, op: int, at: int, size: int) -> int:
    """The number behind GET, PUT and their kin; -1 where it is none."""
    if op == 0x67 or op == 0x70:
        word = _decimal(text, at + 1, at + size - 1)
        return word >> 4 if word & 15 == s.INT else -1
    return _unsigned(text, at + 1, size - 1)


@njit(**COMPILED)  # type: ignore[untyped-decorator]
def _unsigned(text: UInt8Array, at: int, width: int) -> int:
    value = 0
    for i in range(width):
        value |= np.int64(text[at + i]) << (8 * i)
    return value


@njit(**COMPILED)  # type: ignore[untyped-decorator]
def _signed(text: UInt8Array, at: int, width: int) -> int:
    value = _unsigned(text, at, width)
    return value - (1 << (8 * width)) if width < 8 and text[at + width - 1] & 0x80 else value


@njit(**COMPILED)  # type: ignore[untyped-decorator]
def _long(text: UInt8Array, at: int, width: int) -> int:
    """Word of a little-endian two's complement number; HUGE where it does not fit in 60 bits."""
    if width == 0:
        return s.INT
    if width > 8:
        return s.HUGE
    value = _signed(text, at, width)
    return value << 4 | s.INT if -(1 << 59) <= value < 1 << 59 else s.HUGE


@njit(**COMPILED)  # type: ignore[untyped-decorator]
def _decimal(text: UInt8Array, start: int, stop: int) -> int:
    """Word of a decimal number, an L at its end included; HUGE where it is none or does not fit. 00 and 01 are False and True."""
    if stop > start and text[stop - 1] == 0x4C:
        stop -= 1
    sign = 1
    at = start
    if at < stop and text[at] == 0x2D:
        sign, at = -1, at + 1
    if at >= stop or stop - at > 18:
        return s.HUGE
    value = 0
    for i in range(at, stop):
        if not 0x30 <= text[i] <= 0x39:
            return s.HUGE
        value = value * 10 + (np.int64(text[i]) - 0x30)
    value *= sign
    return value << 4 | s.INT if -(1 << 59) <= value < 1 << 59 else s.HUGE
