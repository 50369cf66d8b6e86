"""Compiled: how the containers of a snapshot are packed while its pickle is read. See memory_snapshot_store for what each becomes.

``c`` is the address of the control block everywhere. The caller has made sure that there is room.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types

from tracekit.readers import lex
from tracekit.readers import memory_snapshot_store as s
from tracekit.readers.lex import INLINE, load8, put, store8, word
from tracekit.units import NULL

#: Distinct pairs of numbers (ids of memory pools) that are kept as such.
MOST_PAIRS = 1 << 10
_PRIME = 1_099_511_628_211
_SEED = 1_469_598_103

load_code = lex._loader(32, types.int32, 4)
store_code = lex._storer(32, types.int32, 4)


@njit(**INLINE)
def get(c, array, i):  # type: ignore[no-untyped-def]
    """Element of an array of int64."""
    return word(word(c, array), i)


@njit(**INLINE)
def set_(c, array, i, value):  # type: ignore[no-untyped-def]
    """Set an element of an array of int64."""
    put(word(c, array), i, value)


@njit(**INLINE)
def get4(c, array, i):  # type: ignore[no-untyped-def]
    """Element of an array of int32."""
    return np.int64(load_code(word(c, array), i))


@njit(**INLINE)
def set4(c, array, i, value):  # type: ignore[no-untyped-def]
    """Set an element of an array of int32."""
    store_code(word(c, array), i, np.int32(value))


@njit(**INLINE)
def add(c, part, count):  # type: ignore[no-untyped-def]
    """Use ``count`` more of a part; returns how much was used before."""
    used = word(c, part)
    put(c, part, used + count)
    return used


@njit(**INLINE)
def kind_of(c, container):  # type: ignore[no-untyped-def]
    """Kind of a container."""
    return np.int64(load8(word(c, s.KIND), container))


@njit(**INLINE)
def become(c, container, kind, first):  # type: ignore[no-untyped-def]
    """Give a container another kind and content."""
    store8(word(c, s.KIND), container, np.uint8(kind))
    set4(c, s.FIRST, container, first)


@njit(**INLINE)
def intern(text, start, length, c):  # type: ignore[no-untyped-def]
    """Code of a string, the same for equal strings."""
    characters = word(c, s.CHARACTERS)
    mask = word(c, s.STRING_MASK)
    slot = _hash(text, start, length) & mask
    while True:
        code = get4(c, s.STRING_TABLE, slot)
        if code < 0:
            break
        low = get(c, s.STRING_END, code - 1) if code > 0 else 0
        if get(c, s.STRING_END, code) - low == length:
            i = 0
            while i < length and load8(characters, low + i) == load8(text, start + i):
                i += 1
            if i == length:
                return code
        slot = (slot + 1) & mask
    code = add(c, s.STRINGS, 1)
    used = add(c, s.CHARACTERS_, length)
    for i in range(length):
        store8(characters, used + i, load8(text, start + i))
    set_(c, s.STRING_END, code, used + length)
    set4(c, s.STRING_TABLE, slot, code)
    return code


@njit(**INLINE)
def _hash(text, start, length):  # type: ignore[no-untyped-def]
    value = np.int64(_SEED)
    for i in range(length):
        value = (value ^ np.int64(load8(text, start + i))) * _PRIME
    return value ^ (value >> 29)


@njit(**INLINE)
def _mix(a, b):  # type: ignore[no-untyped-def]
    value = ((np.int64(a) * 1_000_003) ^ np.int64(b)) * _PRIME
    return value ^ (value >> 31)


@njit(**INLINE)
def rehash(c, part):  # type: ignore[no-untyped-def]
    """Fill the empty hash table of a part anew."""
    table, mask = s.NODE_TABLE, word(c, s.NODE_MASK)
    if part == s.STRINGS:
        table, mask = s.STRING_TABLE, word(c, s.STRING_MASK)
    elif part == s.FRAMES_:
        table, mask = s.FRAME_TABLE, word(c, s.FRAME_MASK)
    for i in range(1 if part == s.NODES_ else 0, word(c, part)):
        if part == s.STRINGS:
            low = get(c, s.STRING_END, i - 1) if i > 0 else 0
            value = _hash(word(c, s.CHARACTERS), low, get(c, s.STRING_END, i) - low)
        elif part == s.FRAMES_:
            value = _mix(_mix(get4(c, s.FRAMES, 3 * i), get4(c, s.FRAMES, 3 * i + 1)), get4(c, s.FRAMES, 3 * i + 2))
        else:
            value = _mix(get4(c, s.NODES, 2 * i), get4(c, s.NODES, 2 * i + 1))
        slot = value & mask
        while get4(c, table, slot) >= 0:
            slot = (slot + 1) & mask
        set4(c, table, slot, i)


@njit(**INLINE)
def append(c, container, start, top):  # type: ignore[no-untyped-def]
    """Put the words of the stack from ``start`` to ``top`` at the end of a list, tuple or set. A list of frames becomes a stack."""
    if start >= top:
        return
    kind = kind_of(c, container)
    if kind == s.LIST and get4(c, s.FIRST, container) < 0 and frame_of(c, get(c, s.STACK_, start)) >= 0:
        kind = s.STACK
        become(c, container, s.STACK, 0)
    if kind == s.STACK:
        node = get4(c, s.FIRST, container)
        for i in range(start, top):
            frame = frame_of(c, get(c, s.STACK_, i))
            if frame >= 0:
                node = _child(c, node, frame)
        set4(c, s.FIRST, container, node)
    else:
        push_run(c, container, start, top)


@njit(**INLINE)
def push_run(c, container, start, top):  # type: ignore[no-untyped-def]
    """Keep words as they are."""
    used, run = add(c, s.ALL_WORDS, top - start), add(c, s.RUNS, 1)
    for i in range(top - start):
        set_(c, s.KEPT, used + i, get(c, s.STACK_, start + i))
    set_(c, s.RUN_START, run, used)
    set4(c, s.RUN_LENGTH, run, top - start)
    set4(c, s.RUN_NEXT, run, -1)
    if get4(c, s.FIRST, container) < 0:
        set4(c, s.FIRST, container, run)
    else:
        set4(c, s.RUN_NEXT, get4(c, s.LAST, container), run)
    set4(c, s.LAST, container, run)


@njit(**INLINE)
def set_items(c, container, start, top):  # type: ignore[no-untyped-def]
    """Keys and values of the stack into a dict. A key ``action`` or ``state`` makes it a record, ``filename`` a frame."""
    if kind_of(c, container) == s.DICT:
        record, frame = False, False
        for i in range(start, top, 2):
            key = get(c, s.STACK_, i)
            record |= key == (s.W_ACTION << 4 | s.TEXT) or key == (s.W_STATE << 4 | s.TEXT)
            frame |= key == (s.W_FILENAME << 4 | s.TEXT)
        if record:
            _become_record(c, container)
        elif frame and get4(c, s.FIRST, container) < 0:
            _become_frame(c, container, start, top)
    kind = kind_of(c, container)
    if kind == s.RECORD:
        row = get4(c, s.FIRST, container)
        for i in range(start, top, 2):
            _set_field(c, row, get(c, s.STACK_, i), get(c, s.STACK_, i + 1))
    elif kind == s.DICT:
        push_run(c, container, start, top)


@njit(**INLINE)
def _become_record(c, container):  # type: ignore[no-untyped-def]
    row = add(c, s.RECORDS, 1)
    for i in range(s.NUMBER_COLUMNS):
        set_(c, s.NUMBERS, s.NUMBER_COLUMNS * row + i, NULL)
    for i in range(s.CODE_COLUMNS):
        set4(c, s.CODES, s.CODE_COLUMNS * row + i, -1)
    run = get4(c, s.FIRST, container)
    while run >= 0:
        low = get(c, s.RUN_START, run)
        for i in range(low, low + get4(c, s.RUN_LENGTH, run) - 1, 2):
            _set_field(c, row, get(c, s.KEPT, i), get(c, s.KEPT, i + 1))
        run = get4(c, s.RUN_NEXT, run)
    become(c, container, s.RECORD, row)


@njit(**INLINE)
def _set_field(c, row, key, value):  # type: ignore[no-untyped-def]
    name, kind, content = key >> 4, value & 15, value >> 4
    numbers, codes = s.NUMBER_COLUMNS * row, s.CODE_COLUMNS * row
    if key & 15 != s.TEXT:
        return
    if kind == s.INT:
        if name == s.W_ADDR or name == s.W_ADDRESS or name == s.W_DEVICE_FREE:
            set_(c, s.NUMBERS, numbers + s.PLACE, content)
        elif name == s.W_SIZE:
            set_(c, s.NUMBERS, numbers + s.AMOUNT, content)
        elif name == s.W_TIME or name == s.W_REQUESTED:
            set_(c, s.NUMBERS, numbers + s.WHEN, content)
    elif kind == s.TEXT:
        if name == s.W_ACTION or name == s.W_STATE:
            set4(c, s.CODES, codes + s.WORD, content)
        elif name == s.W_METADATA:
            set4(c, s.CODES, codes + s.METADATA, content)
    elif kind == s.CONTAINER:
        if name == s.W_FRAMES:
            _set_stack(c, row, content)
        elif name == s.W_POOL and kind_of(c, content) == s.PAIR:
            set4(c, s.CODES, codes + s.POOL, get4(c, s.FIRST, content))
        elif name == s.W_HISTORY and kind_of(c, content) == s.LIST and get4(c, s.FIRST, content) >= 0:
            run = get4(c, s.LAST, content)
            newest = get(c, s.KEPT, get(c, s.RUN_START, run) + get4(c, s.RUN_LENGTH, run) - 1)
            if newest & 15 == s.CONTAINER and kind_of(c, newest >> 4) == s.DICT:
                frames = _value_of(c, newest >> 4, s.W_FRAMES)
                if frames & 15 == s.CONTAINER:
                    _set_stack(c, row, frames >> 4)


@njit(**INLINE)
def _set_stack(c, row, container):  # type: ignore[no-untyped-def]
    kind = kind_of(c, container)
    if kind == s.STACK:
        set4(c, s.CODES, s.CODE_COLUMNS * row + s.STACK_OF, get4(c, s.FIRST, container))
    elif kind == s.LIST:
        set4(c, s.CODES, s.CODE_COLUMNS * row + s.STACK_OF, 0)


@njit(**INLINE)
def _value_of(c, container, name):  # type: ignore[no-untyped-def]
    """Word of a key of a dict that is kept as it is; NONE where it has none."""
    found = np.int64(s.NONE)
    run = get4(c, s.FIRST, container)
    while run >= 0:
        low = get(c, s.RUN_START, run)
        for i in range(low, low + get4(c, s.RUN_LENGTH, run) - 1, 2):
            if get(c, s.KEPT, i) == (name << 4 | s.TEXT):
                found = get(c, s.KEPT, i + 1)
        run = get4(c, s.RUN_NEXT, run)
    return found


@njit(**INLINE)
def frame_of(c, value):  # type: ignore[no-untyped-def]
    """The frame that a word stands for, a dict that grew key by key included; -1 for anything else."""
    if value & 15 != s.CONTAINER:
        return np.int64(-1)
    container = value >> 4
    if kind_of(c, container) == s.DICT and get4(c, s.FIRST, container) >= 0:
        file = _value_of(c, container, s.W_FILENAME)
        if file & 15 == s.TEXT:
            become(c, container, s.FRAME, _frame(c, file, _value_of(c, container, s.W_LINE), _value_of(c, container, s.W_NAME)))
    return get4(c, s.FIRST, container) if kind_of(c, container) == s.FRAME else np.int64(-1)


@njit(**INLINE)
def _become_frame(c, container, start, top):  # type: ignore[no-untyped-def]
    file = line = name = np.int64(s.NONE)
    for i in range(start, top, 2):
        key, value = get(c, s.STACK_, i), get(c, s.STACK_, i + 1)
        if key == (s.W_FILENAME << 4 | s.TEXT):
            file = value
        elif key == (s.W_NAME << 4 | s.TEXT):
            name = value
        elif key == (s.W_LINE << 4 | s.TEXT):
            line = value
    become(c, container, s.FRAME, _frame(c, file, line, name))


@njit(**INLINE)
def _frame(c, file_word, line_word, name_word):  # type: ignore[no-untyped-def]
    """Number of a frame by the words of its file, line and function."""
    file = file_word >> 4 if file_word & 15 == s.TEXT else 0
    name = name_word >> 4 if name_word & 15 == s.TEXT else 0
    line = min(max(line_word >> 4, -1), 2**31 - 1) if line_word & 15 == s.INT else 0
    mask = word(c, s.FRAME_MASK)
    slot = _mix(_mix(file, line), name) & mask
    while True:
        known = get4(c, s.FRAME_TABLE, slot)
        if known < 0:
            break
        if get4(c, s.FRAMES, 3 * known) == file and get4(c, s.FRAMES, 3 * known + 1) == line and get4(c, s.FRAMES, 3 * known + 2) == name:
            return known
        slot = (slot + 1) & mask
    number = add(c, s.FRAMES_, 1)
    set4(c, s.FRAMES, 3 * number, file)
    set4(c, s.FRAMES, 3 * number + 1, line)
    set4(c, s.FRAMES, 3 * number + 2, name)
    set4(c, s.FRAME_TABLE, slot, number)
    return number


@njit(**INLINE)
def _child(c, node, frame):  # type: ignore[no-untyped-def]
    """The node of a stack with one frame more behind it."""
    mask = word(c, s.NODE_MASK)
    slot = _mix(node, frame) & mask
    while True:
        known = get4(c, s.NODE_TABLE, slot)
        if known < 0:
            break
        if get4(c, s.NODES, 2 * known) == node and get4(c, s.NODES, 2 * known + 1) == frame:
            return known
        slot = (slot + 1) & mask
    number = add(c, s.NODES_, 1)
    set4(c, s.NODES, 2 * number, node)
    set4(c, s.NODES, 2 * number + 1, frame)
    set4(c, s.NODE_TABLE, slot, number)
    return number


@njit(**INLINE)
def pair_of_numbers(c, start):  # type: ignore[no-untyped-def]
    """Code of two numbers on the stack; -1 where they are none, or where there are too many different ones."""
    one, two = get(c, s.STACK_, start), get(c, s.STACK_, start + 1)
    if one & 15 != s.INT or two & 15 != s.INT:
        return np.int64(-1)
    known = word(c, s.PAIRS_)
    for code in range(known):
        if get(c, s.PAIRS, 2 * code) == one >> 4 and get(c, s.PAIRS, 2 * code + 1) == two >> 4:
            return np.int64(code)
    if known >= MOST_PAIRS:
        return np.int64(-1)
    set_(c, s.PAIRS, 2 * known, one >> 4)
    set_(c, s.PAIRS, 2 * known + 1, two >> 4)
    put(c, s.PAIRS_, known + 1)
    return known
