"""The one pass over the bytes of a trace: complete events of a buffer become rows of columns.

Which arguments are read is data (``keys.Spec``), so a new argument needs no new code. The pass is strict where it matters: anything
that is not JSON, apart from a comma too many, stops it at the start of that event (SYNTAX), and the tolerant reader takes over for
that one event.

Bounds: reads as in lex.py (the caller pads its buffer); every write goes to a row below ``capacity`` of the output arrays, which is checked
before an event is begun, to a side row below the same capacity (an event adds at most one row to each side table), or through
``pool.intern``, which checks its own.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from tracekit.compiled import COMPILED
from tracekit.readers.keys import (
    ARGS,
    ARROWS,
    BAD_NUMBERS,
    COMMAS,
    COUNTERS,
    DEVICE,
    DUPLICATES,
    DUR,
    DUR_KEY,
    FLAG_DUPLICATE,
    JSON,
    KIND,
    LANE,
    LANES,
    MEMORY_NAME,
    MICRO,
    NAME,
    NAME_KEY,
    NARROW,
    NO_LANE_KEY,
    PH,
    PID,
    ROW,
    STREAM,
    STRING,
    STRING_KEY,
    TID,
    TS,
    TS_KEY,
    WIDE,
    key_number,
)
from tracekit.readers.lex import (
    CLOSE_LIST,
    CLOSE_OBJECT,
    COLON,
    COMMA,
    OPEN_LIST,
    OPEN_OBJECT,
    QUOTE,
    end_of_string,
    end_of_value,
    load8,
    number,
    skip_space,
)
from tracekit.readers.pool import ESCAPED, PLAIN, RAW, addresses, intern
from tracekit.units import NULL, NULL32

#: Why the pass stopped.
MORE, END, POOL_FULL, ROWS_FULL, SYNTAX = 0, 1, 2, 3, 4


@njit(**COMPILED)
def _text_code(text, i, end, pool, as_json):  # type: ignore[no-untyped-def]
    """Code of the value at ``i`` and the offset behind it: a string's content; the raw text of anything else, and with ``as_json``."""
    if load8(text, i) == QUOTE and not as_json:
        j, escaped = end_of_string(text, i + 1, end)
        if j >= end:
            return np.int64(0), end
        return intern(text, i + 1, j - i - 1, ESCAPED if escaped else PLAIN, pool), j + 1
    j = end_of_value(text, i, end)
    if j >= end:
        return np.int64(0), end
    return intern(text, i, j - i, RAW, pool), j


@njit(**COMPILED)
def _lane(pid, tid, lanes, lane_table, counters):  # type: ignore[no-untyped-def]
    """Number of the lane (pid, tid); -1 when the table of lanes is full."""
    mask = lane_table.size - 1
    mixed = np.uint64(pid) * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(tid) * np.uint64(0xC2B2AE3D27D4EB4F)
    place = np.int64(mixed >> np.uint64(40)) & mask
    while True:
        lane = lane_table[place]
        if lane < 0:
            break
        if lanes[0, lane] == pid and lanes[1, lane] == tid:
            return np.int64(lane)
        place = (place + 1) & mask
    lane = counters[LANES]
    if lane >= lanes.shape[1] or 2 * lane >= lane_table.size:
        return np.int64(-1)
    lanes[0, lane] = pid
    lanes[1, lane] = tid
    lane_table[place] = lane
    counters[LANES] = lane + 1
    return np.int64(lane)


@njit(**COMPILED)
def scan_events(  # type: ignore[no-untyped-def]
    buffer,
    position,
    end,
    top_keys,
    argument_keys,
    target,
    first,
    width,
    wide,
    narrow,
    side,
    side_rows,
    side_used,
    lanes,
    lane_table,
    counters,
    table,
    hashes,
    entries,
    arena,
    used,
    category_of_code,
):
    """Read complete events of ``buffer[position:end]`` into the output arrays; returns (why it stopped, where).

    ``wide`` int64 [4, capacity], ``narrow`` int32 [5, capacity], ``side`` int64 [side columns, capacity], ``side_rows`` int64 [side tables,
    capacity]: the row of each side row. An event that is not complete, or that did not fit, has left nothing behind.
    """
    text = buffer.ctypes.data
    top = top_keys.ctypes.data
    arguments = argument_keys.ctypes.data
    pool = addresses(table, hashes, entries, arena, used)
    capacity = wide.shape[1]
    tables = side_used.size
    current = np.empty(tables, np.int64)
    row = counters[ROW]
    lane = np.int64(-1)
    separated = True  # the caller starts at an event
    while True:
        i = skip_space(text, position, end)
        if i >= end:
            counters[ROW] = row
            return MORE, i
        c = load8(text, i)
        if c == COMMA:
            i = skip_space(text, i + 1, end)
            if i >= end:
                counters[ROW] = row
                return MORE, position
            c = load8(text, i)
            separated = True
            if c == CLOSE_LIST:
                counters[COMMAS] += 1
        if c == CLOSE_LIST:
            counters[ROW] = row
            return END, i + 1
        if c != OPEN_OBJECT or not separated:
            counters[ROW] = row
            return SYNTAX, i
        if row >= capacity:
            counters[ROW] = row
            return ROWS_FULL, i
        begin = i
        for k in range(4):
            wide[k, row] = NULL
        narrow[NAME, row] = 0
        narrow[STREAM, row] = NULL32
        narrow[DEVICE, row] = NULL32
        for k in range(tables):
            current[k] = -1
        phase = np.int64(0)
        category_code = np.int64(0)
        pid = np.int64(NO_LANE_KEY)
        tid = np.int64(NO_LANE_KEY)
        commas = 0
        bad_numbers = 0
        duplicate = False
        seen = 0  # bits of the top-level keys
        in_args = False
        need_comma = False
        status = -1
        i += 1
        while True:
            i = skip_space(text, i, end)
            if i >= end:
                status = MORE
                break
            c = load8(text, i)
            if c == COMMA and need_comma:
                i = skip_space(text, i + 1, end)
                if i >= end:
                    status = MORE
                    break
                c = load8(text, i)
                need_comma = False
                if c == CLOSE_OBJECT:
                    commas += 1
            if c == CLOSE_OBJECT:
                i += 1
                if in_args:
                    in_args = False
                    need_comma = True
                    continue
                break
            if c != QUOTE or need_comma:
                status = SYNTAX
                break
            start = i + 1
            stop, _ = end_of_string(text, start, end)
            if stop >= end:
                status = MORE
                break
            i = skip_space(text, stop + 1, end)
            if i >= end:
                status = MORE
                break
            if load8(text, i) != COLON:
                status = SYNTAX
                break
            i = skip_space(text, i + 1, end)
            if i >= end:
                status = MORE
                break
            c = load8(text, i)
            if c == COMMA or c == CLOSE_OBJECT or c == CLOSE_LIST or c == COLON:
                status = SYNTAX
                break
            need_comma = True
            if not in_args:
                key = key_number(text, start, stop - start, top)
                if key < 0:
                    i = end_of_value(text, i, end)
                else:
                    if seen >> key & 1:
                        duplicate = True
                    seen |= 1 << key
                    if key == TS_KEY or key == DUR_KEY:
                        value, i, valid = number(text, i, end, 3)
                        wide[TS if key == TS_KEY else DUR, row] = value if valid else NULL
                        bad_numbers += 1 - valid
                    elif key == ARGS:
                        if c == OPEN_OBJECT:
                            in_args = True
                            need_comma = False
                            i += 1
                        else:
                            i = end_of_value(text, i, end)
                    elif key == PH:
                        j = end_of_value(text, i, end)
                        phase = np.int64(load8(text, i + 1)) if c == QUOTE and j - i == 3 else np.int64(0)
                        i = j
                    elif key == PID or key == TID:
                        value, j, valid = number(text, i, end, 0)
                        if not valid:
                            code, j = _text_code(text, i, end, pool, False)
                            if code < 0:
                                status = POOL_FULL
                                break
                            value = np.int64(STRING_KEY) + code
                        i = j
                        if key == PID:
                            pid = value
                        else:
                            tid = value
                    else:
                        code, i = _text_code(text, i, end, pool, False)
                        if code < 0:
                            status = POOL_FULL
                            break
                        if key == NAME_KEY:
                            narrow[NAME, row] = code
                        else:
                            category_code = code
            else:
                key = key_number(text, start, stop - start, arguments)
                if key < 0:
                    i = end_of_value(text, i, end)
                else:
                    what = target[0, key]
                    column = target[2, key]
                    if what == STRING or what == JSON:
                        value, i = _text_code(text, i, end, pool, what == JSON)
                        if value < 0:
                            status = POOL_FULL
                            break
                    else:
                        value, i, valid = number(text, i, end, 6 if what == MICRO else 0)
                        if not valid:
                            value = np.int64(NULL)
                    if what == WIDE:
                        if wide[column, row] != NULL:
                            duplicate = True
                        wide[column, row] = value
                    elif what == NARROW:
                        if narrow[column, row] != NULL32:
                            duplicate = True
                        fits = value > -(1 << 31) and value < (1 << 31)
                        narrow[column, row] = np.int32(value) if fits else NULL32
                    else:
                        number_ = target[1, key]
                        at = current[number_]
                        if at < 0:
                            at = side_used[number_]
                            current[number_] = at
                            side_used[number_] = at + 1
                            side_rows[number_, at] = row
                            for k in range(first[number_], first[number_] + width[number_]):
                                side[k, at] = NULL
                        elif side[column, at] != NULL:
                            duplicate = True
                        side[column, at] = value
            if i >= end:
                status = MORE
                break
        if status < 0:
            if lane < 0 or lanes[0, lane] != pid or lanes[1, lane] != tid:
                lane = _lane(pid, tid, lanes, lane_table, counters)
            if lane < 0:
                status = ROWS_FULL
        is_arrow = phase == 115 or phase == 116 or phase == 102  # s, t, f
        if status >= 0 or is_arrow:
            for k in range(tables):
                if current[k] >= 0:
                    side_used[k] -= 1
        if status >= 0:
            counters[ROW] = row
            return status, begin
        position = i
        separated = False
        counters[COMMAS] += commas
        if is_arrow:
            counters[ARROWS] += 1
            continue
        category = category_of_code[category_code] if category_code < category_of_code.size else 0
        if phase == 77:  # M
            category = 11
        elif narrow[NAME, row] == MEMORY_NAME:
            category = 9
        narrow[LANE, row] = lane
        narrow[KIND, row] = category + 256 * phase + (FLAG_DUPLICATE if duplicate else 0)
        counters[DUPLICATES] += 1 if duplicate else 0
        counters[BAD_NUMBERS] += bad_numbers
        row += 1


@njit(**COMPILED)
def find_events(buffer, start, end):  # type: ignore[no-untyped-def]
    """Offset behind the ``[`` of the top level's traceEvents, or of a top-level list; -1: not yet, -2: not this way."""
    text = buffer.ctypes.data
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
        if i < end and load8(text, i) == COMMA:
            i = skip_space(text, i + 1, end)
        if i >= end:
            return -1
        if load8(text, i) != QUOTE:
            return -2
        begin = i + 1
        stop, _ = end_of_string(text, begin, end)
        if stop >= end:
            return -1
        i = skip_space(text, stop + 1, end)
        if i >= end:
            return -1
        if load8(text, i) != COLON:
            return -2
        i = skip_space(text, i + 1, end)
        if i >= end:
            return -1
        if load8(text, i) == OPEN_LIST and stop - begin == 11 and _is_trace_events(text, begin):
            return i + 1
        i = end_of_value(text, i, end)
        if i >= end:
            return -1


@njit(**COMPILED)
def _is_trace_events(text, i):  # type: ignore[no-untyped-def]
    same = True
    for k, c in enumerate((116, 114, 97, 99, 101, 69, 118, 101, 110, 116, 115)):
        same &= load8(text, i + k) == c
    return same


@njit(**COMPILED)
def rehash_lanes(lanes, lane_table, count):  # type: ignore[no-untyped-def]
    """Put the first ``count`` lanes into an empty, larger table."""
    scratch = np.zeros(COUNTERS, np.int64)
    for lane in range(count):
        scratch[LANES] = lane
        _lane(lanes[0, lane], lanes[1, lane], lanes, lane_table, scratch)
