"""The one pass over the bytes of a trace: complete events of a buffer become rows of columns.

Everything compiled code needs is found through one *control block*, an array of int64 words (addresses, sizes, counters) that Python fills;
``word(control, N)`` is its word number N. An event is gathered in the *record*, one word a key, and in at most one row of each side table;
only an event that is complete leaves the record as a row of the columns.

The pass is strict where it matters: anything that is not JSON, apart from a comma too many, stops it at the start of that event (SYNTAX),
and the tolerant reader takes over for that one event.

Bounds. Reads of text: see lex.py. A column's row is below CAPACITY, which is checked before an event is begun. A side table gains at
most one row an event, so it has no more rows than the columns. Columns and words come from keys.Spec, to whose counts Python allocates
all arrays. A lane is below LANE_CAPACITY, its place below the size of the lane table: a power of two, at least twice LANE_CAPACITY.
"""

from __future__ import annotations

import numpy as np

from tracekit.compiled import Native, jit
from tracekit.readers.keys import (
    ARGS,
    CAT,
    CORRELATION,
    DEVICE,
    DUR,
    EXTERNAL_ID,
    JSON,
    MICRO,
    NAME,
    PH,
    PID,
    RECORD,
    STREAM,
    STRING,
    TID,
    TS,
    find_key,
)
from tracekit.readers.lex import (
    CLOSE_LIST,
    CLOSE_OBJECT,
    COLON,
    COMMA,
    COMPILED,
    INLINE,
    OPEN_LIST,
    OPEN_OBJECT,
    QUOTE,
    end_of_string,
    end_of_value,
    load8,
    load32,
    load_int64,
    put,
    skip_space,
    store8,
    store32,
    store_int64,
    word,
)
from tracekit.readers.numbers import MINUS, number
from tracekit.readers.pool import ESCAPED, PLAIN, RAW, intern
from tracekit.trace.events import CATEGORY_NAMES, Category
from tracekit.units import NULL, NULL32

#: Why the pass stopped.
MORE, END, POOL_FULL, ROWS_FULL, LANES_FULL, SYNTAX = range(6)
_COMPLETE = 6

#: Words of the control block: addresses and sizes, then what the pass counts.
(TOP, ARGUMENTS, TARGETS, POOL, RECORD_AT, CATEGORIES, WIDE, NARROW, SMALL, CAPACITY) = range(10)
(SIDE, SIDE_ROWS, SIDE_USED, SIDE_FIRST, SIDE_WIDTH, SIDE_TABLES, LANE_KEYS, LANE_TABLE, LANE_MASK, LANE_CAPACITY) = range(10, 20)
(ROW, ARROWS, COMMAS, DUPLICATES, BAD_TIMES, LANES, LAST_LANE) = range(20, 27)
CONTROL_WORDS = 27

#: Words of the record behind those of keys.py: which words were set, which twice (bits), commas too many, times that are no number.
_SEEN, _TWICE, _COMMAS, _BAD = range(12, 16)
RECORD_WORDS = 16

#: Columns of the outputs: int64, int32, and bytes. The top bit of PHASE says that the event has its stream twice.
WIDE_TS, WIDE_DUR, WIDE_CORRELATION, WIDE_EXTERNAL_ID = range(4)
NARROW_NAME, NARROW_LANE, NARROW_STREAM, NARROW_DEVICE = range(4)
SMALL_CATEGORY, SMALL_PHASE = range(2)
TWICE_BIT = 128

#: Strings with fixed codes (from 1): categories, then a name that decides the category.
KNOWN = (*CATEGORY_NAMES, "[memory]")
_MEMORY_NAME = len(KNOWN)
CATEGORY_OF_CODE = np.array([int(Category.OTHER), *(int(c) for c in CATEGORY_NAMES.values())], np.int64)
_CATEGORIES_KNOWN = len(CATEGORY_OF_CODE)
_METADATA, _MEMORY, _OTHER = int(Category.METADATA), int(Category.MEMORY), int(Category.OTHER)

#: A pid or tid that is no number, or none of 62 bits: this plus the code of its text. One that is missing is NULL.
TEXT_KEY = 1 << 62

# Not plain ints: numba compiles a function anew for every literal argument.
_WHOLE, _THREE_DIGITS, _SIX_DIGITS = np.int64(0), np.int64(3), np.int64(6)
_NOT_JSON = np.bool_(False)
_FULL = -1  # in place of an offset: the pool must grow
_S, _T, _F, _M = (ord(c) for c in "stfM")


@jit(**COMPILED)
def scan_events(text: Native, position: Native, end: Native, control: Native) -> Native:
    """Read the complete events of ``text[position:end]``; returns (why it stopped, where). ``position``: an event, or what is before one.

    An event that is not complete, or that did not fit, has left nothing behind but strings in the pool.
    """
    record = word(control, RECORD_AT)
    row = word(control, ROW)
    separated = True
    while True:
        i = skip_space(text, position, end)
        c = load8(text, i)
        if c == COMMA:
            i = skip_space(text, i + 1, end)
            c = load8(text, i)
            separated = True
            if c == CLOSE_LIST:
                put(control, COMMAS, word(control, COMMAS) + 1)
        if i >= end:
            return MORE, position
        if c == CLOSE_LIST:
            return END, i + 1
        if c != OPEN_OBJECT or not separated:
            return SYNTAX, i
        if row >= word(control, CAPACITY):
            return ROWS_FULL, i
        status, behind = _read_event(text, i + 1, end, row, control)
        if status == _COMPLETE:
            phase = word(record, PH)
            if phase == _S or phase == _T or phase == _F:
                _drop_side_rows(control, row)
                put(control, ARROWS, word(control, ARROWS) + 1)
            elif _commit(control, record, row):
                row += 1
                put(control, ROW, row)
            else:
                status = LANES_FULL
        if status != _COMPLETE:
            _drop_side_rows(control, row)
            return status, i
        position = behind
        separated = False


@jit(**COMPILED)
def _read_event(text: Native, i: Native, end: Native, row: Native, control: Native) -> Native:
    """Gather the event whose ``{`` is before ``i``: (_COMPLETE or why not, offset behind it)."""
    record = word(control, RECORD_AT)
    _clear(record)
    in_args = False
    need_comma = False
    while True:
        i = skip_space(text, i, end)
        c = load8(text, i)
        if c == COMMA and need_comma:
            i = skip_space(text, i + 1, end)
            c = load8(text, i)
            need_comma = False
            if c == CLOSE_OBJECT:
                put(record, _COMMAS, word(record, _COMMAS) + 1)
        if c == CLOSE_OBJECT:
            i += 1
            if not in_args:
                return _COMPLETE, i
            in_args = False
            need_comma = True
            continue
        if c != QUOTE or need_comma:
            return (SYNTAX if i < end else MORE), i
        start = i + 1
        stop, _ = end_of_string(text, start, end)
        i = skip_space(text, stop + 1, end)
        if load8(text, i) != COLON:
            return (SYNTAX if i < end else MORE), i
        i = skip_space(text, i + 1, end)
        c = load8(text, i)
        if c == COMMA or c == CLOSE_OBJECT or c == CLOSE_LIST or c == COLON:
            return SYNTAX, i
        need_comma = True
        if in_args:
            key = find_key(text, start, stop - start, word(control, ARGUMENTS))
            i = end_of_value(text, i, end) if key < 0 else _read_argument(text, i, end, key, row, control)
        else:
            key = find_key(text, start, stop - start, word(control, TOP))
            if key == ARGS and c == OPEN_OBJECT:
                _mark(record, key)
                in_args = True
                need_comma = False
                i += 1
            else:
                i = end_of_value(text, i, end) if key < 0 else _read_top(text, i, end, key, record, word(control, POOL))
        if i < 0:
            return POOL_FULL, i
        if i >= end:
            return MORE, i


@jit(**INLINE)
def _clear(record: Native) -> Native:
    put(record, TS, NULL)
    put(record, DUR, NULL)
    put(record, PID, NULL)
    put(record, TID, NULL)
    put(record, CORRELATION, NULL)
    put(record, EXTERNAL_ID, NULL)
    put(record, STREAM, NULL)
    put(record, DEVICE, NULL)
    put(record, NAME, 0)
    put(record, CAT, 0)
    put(record, PH, 0)
    put(record, _SEEN, 0)
    put(record, _TWICE, 0)
    put(record, _COMMAS, 0)
    put(record, _BAD, 0)


@jit(**INLINE)
def _mark(record: Native, n: Native) -> Native:
    """Note that word ``n`` is set, and whether it was before."""
    seen = word(record, _SEEN)
    bit = np.int64(1) << n
    put(record, _TWICE, word(record, _TWICE) | (seen & bit))
    put(record, _SEEN, seen | bit)


@jit(**COMPILED)
def _read_top(text: Native, i: Native, end: Native, key: Native, record: Native, pool: Native) -> Native:
    """The value of one of TOP_KEYS goes to the record; returns the offset behind it, or _FULL."""
    _mark(record, key)
    if key == TS or key == DUR:
        value, i, valid = number(text, i, end, _THREE_DIGITS)
        put(record, key, value if valid else NULL)
        if not valid:
            put(record, _BAD, word(record, _BAD) + 1)
    elif key == PH:
        value, i = _one_letter(text, i, end)
        put(record, PH, value)
    elif key == PID or key == TID:
        value, i = _lane_part(text, i, end, pool)
        put(record, key, value)
    elif key == ARGS:  # not an object
        i = end_of_value(text, i, end)
    else:
        value, i = _text_code(text, i, end, pool, _NOT_JSON)
        put(record, key, value)
    return i


@jit(**COMPILED)
def _one_letter(text: Native, i: Native, end: Native) -> Native:
    """(the one ASCII character of a string, or 0, offset behind the value)."""
    letter = np.int64(load8(text, i + 1))
    behind = end_of_value(text, i, end)
    if load8(text, i) == QUOTE and behind - i == 3 and letter < 128:
        return letter, behind
    return np.int64(0), behind


@jit(**COMPILED)
def _lane_part(text: Native, i: Native, end: Native, pool: Native) -> Native:
    """(pid or tid, offset behind it or _FULL): the number, also of a number in quotes; TEXT_KEY + code of anything else."""
    value, behind, valid = number(text, i, end, _WHOLE)
    if valid and value < TEXT_KEY and value > -TEXT_KEY:
        below = load8(text, i) == MINUS or (load8(text, i) == QUOTE and load8(text, i + 1) == MINUS)
        if below == (value < 0):  # else an unsigned number of 64 bits
            return value, behind
    code, behind = _text_code(text, i, end, pool, _NOT_JSON)
    return TEXT_KEY + code, behind


@jit(**COMPILED)
def _text_code(text: Native, i: Native, end: Native, pool: Native, as_json: Native) -> Native:
    """(code of the value, offset behind it or _FULL): of a string's content; of the raw text of anything else, and with ``as_json``."""
    if load8(text, i) == QUOTE and not as_json:
        start = i + 1
        stop, escaped = end_of_string(text, start, end)
        kind = ESCAPED if escaped else PLAIN
        behind = stop + 1
    else:
        start = i
        stop = end_of_value(text, i, end)
        kind = RAW
        behind = stop
    if stop >= end:
        return np.int64(0), end
    code = intern(text, start, stop - start, kind, pool)
    return code, (behind if code >= 0 else np.int64(_FULL))


@jit(**COMPILED)
def _read_argument(text: Native, i: Native, end: Native, key: Native, row: Native, control: Native) -> Native:
    """The value of a wanted argument goes to the record or to a side table; returns the offset behind it, or _FULL."""
    target = word(control, TARGETS) + 32 * key
    how = word(target, 0)
    if how == STRING or how == JSON:
        value, i = _text_code(text, i, end, word(control, POOL), how == JSON)
        if i < 0:
            return i
    else:
        value, i, valid = number(text, i, end, _SIX_DIGITS if how == MICRO else _WHOLE)
        if not valid:
            value = np.int64(NULL)
    record = word(control, RECORD_AT)
    table = word(target, 1)
    if table == RECORD:
        _mark(record, word(target, 2))
        put(record, word(target, 2), value)
    else:
        cell = word(control, SIDE) + 8 * (word(target, 2) * word(control, CAPACITY) + _side_row(control, table, row))
        if load_int64(cell, 0) != NULL:
            put(record, _TWICE, word(record, _TWICE) | (1 << ARGS))
        store_int64(cell, 0, value)
    return i


@jit(**COMPILED)
def _side_row(control: Native, table: Native, row: Native) -> Native:
    """The row of a side table that belongs to the event: its last one, or a new one with nothing in it."""
    capacity = word(control, CAPACITY)
    used = word(word(control, SIDE_USED), table)
    rows = word(control, SIDE_ROWS) + 8 * table * capacity
    if used > 0 and word(rows, used - 1) == row:
        return used - 1
    put(rows, used, row)
    put(word(control, SIDE_USED), table, used + 1)
    first = word(word(control, SIDE_FIRST), table)
    for column in range(first, first + word(word(control, SIDE_WIDTH), table)):
        put(word(control, SIDE), column * capacity + used, NULL)
    return used


@jit(**COMPILED)
def _drop_side_rows(control: Native, row: Native) -> Native:
    """Take back the side rows of an event that does not become a row."""
    capacity = word(control, CAPACITY)
    counts = word(control, SIDE_USED)
    for table in range(word(control, SIDE_TABLES)):
        used = word(counts, table)
        if used > 0 and word(word(control, SIDE_ROWS), table * capacity + used - 1) == row:
            put(counts, table, used - 1)


@jit(**COMPILED)
def _commit(control: Native, record: Native, row: Native) -> Native:
    """Write the record as a row; False when there is no room for its lane."""
    lane = find_lane(control, word(record, PID), word(record, TID))
    if lane < 0:
        return False
    capacity = word(control, CAPACITY)
    wide = word(control, WIDE) + 8 * row
    store_int64(wide, 8 * capacity * WIDE_TS, word(record, TS))
    store_int64(wide, 8 * capacity * WIDE_DUR, word(record, DUR))
    store_int64(wide, 8 * capacity * WIDE_CORRELATION, word(record, CORRELATION))
    store_int64(wide, 8 * capacity * WIDE_EXTERNAL_ID, word(record, EXTERNAL_ID))
    narrow = word(control, NARROW) + 4 * row
    store32(narrow, 4 * capacity * NARROW_NAME, np.int32(word(record, NAME)))
    store32(narrow, 4 * capacity * NARROW_LANE, np.int32(lane))
    store32(narrow, 4 * capacity * NARROW_STREAM, _narrowed(word(record, STREAM)))
    store32(narrow, 4 * capacity * NARROW_DEVICE, _narrowed(word(record, DEVICE)))
    twice = word(record, _TWICE)
    small = word(control, SMALL) + row
    store8(small, capacity * SMALL_CATEGORY, np.uint8(_category(control, record)))
    store8(small, capacity * SMALL_PHASE, np.uint8(word(record, PH) + (TWICE_BIT if twice & (1 << STREAM) else 0)))
    put(control, COMMAS, word(control, COMMAS) + word(record, _COMMAS))
    put(control, DUPLICATES, word(control, DUPLICATES) + (1 if twice else 0))
    put(control, BAD_TIMES, word(control, BAD_TIMES) + word(record, _BAD))
    return True


@jit(**INLINE)
def _narrowed(value: Native) -> Native:
    return np.int32(value) if value > -(1 << 31) and value < (1 << 31) else np.int32(NULL32)


@jit(**INLINE)
def _category(control: Native, record: Native) -> Native:
    code = word(record, CAT)
    if word(record, PH) == _M:
        return np.int64(_METADATA)
    if word(record, NAME) == _MEMORY_NAME:
        return np.int64(_MEMORY)
    return word(word(control, CATEGORIES), code) if code < _CATEGORIES_KNOWN else np.int64(_OTHER)


@jit(**COMPILED)
def find_lane(control: Native, pid: Native, tid: Native) -> Native:
    """Number of the lane (pid, tid), new or known; -1 when there is no room for another. Events mostly are on the lane of the last one."""
    keys = word(control, LANE_KEYS)
    count = word(control, LANES)
    lane = word(control, LAST_LANE)
    if lane < count and word(keys, 2 * lane) == pid and word(keys, 2 * lane + 1) == tid:
        return lane
    mask = word(control, LANE_MASK)
    mixed = np.uint64(pid) * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(tid) * np.uint64(0xC2B2AE3D27D4EB4F)
    slot_index = np.int64(mixed >> np.uint64(40)) & mask
    while True:
        lane = np.int64(load32(word(control, LANE_TABLE), 4 * slot_index))
        if lane < 0:
            break
        if word(keys, 2 * lane) == pid and word(keys, 2 * lane + 1) == tid:
            put(control, LAST_LANE, lane)
            return lane
        slot_index = (slot_index + 1) & mask
    if count >= word(control, LANE_CAPACITY):
        return np.int64(-1)
    put(keys, 2 * count, pid)
    put(keys, 2 * count + 1, tid)
    store32(word(control, LANE_TABLE), 4 * slot_index, np.int32(count))
    put(control, LANES, count + 1)
    put(control, LAST_LANE, count)
    return count


@jit(**COMPILED)
def rehash_lanes(control: Native) -> Native:
    """Enter the lanes that there are into a new, empty table."""
    count = word(control, LANES)
    keys = word(control, LANE_KEYS)
    put(control, LANES, 0)
    put(control, LAST_LANE, 0)
    for lane in range(count):
        find_lane(control, word(keys, 2 * lane), word(keys, 2 * lane + 1))


@jit(**COMPILED)
def find_events(text: Native, start: Native, end: Native) -> Native:
    """Offset behind the ``[`` of the top level's traceEvents, or of a top-level list; -1: not yet, -2: not this way."""
    i = skip_space(text, start, end)
    if i >= end:
        return -1
    if load8(text, i) == OPEN_LIST:
        return i + 1
    if load8(text, i) != OPEN_OBJECT:
        return -2
    i += 1
    while True:
        i = skip_space(text, i, end)
        if load8(text, i) == COMMA:
            i = skip_space(text, i + 1, end)
        if load8(text, i) != QUOTE:
            return -1 if i >= end else -2
        begin = i + 1
        stop, _ = end_of_string(text, begin, end)
        i = skip_space(text, stop + 1, end)
        if load8(text, i) != COLON:
            return -1 if i >= end else -2
        i = skip_space(text, i + 1, end)
        if load8(text, i) == OPEN_LIST and stop - begin == 11 and _is_trace_events(text, begin):
            return i + 1
        i = end_of_value(text, i, end)
        if i >= end:
            return -1


@jit(**COMPILED)
def _is_trace_events(text: Native, i: Native) -> Native:
    same = True
    for k, c in enumerate((116, 114, 97, 99, 101, 69, 118, 101, 110, 116, 115)):
        same &= load8(text, i + k) == c
    return same
