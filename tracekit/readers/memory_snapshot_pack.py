"""Compiled: how the containers of a snapshot are packed while its pickle is read. See memory_snapshot_store for what each becomes."""

from __future__ import annotations

import numpy as np
from numba import njit

from tracekit.compiled import COMPILED
from tracekit.readers import memory_snapshot_store as s
from tracekit.readers.memory_snapshot_store import Store
from tracekit.trace.events import UInt8Array

#: Distinct pairs of numbers (ids of memory pools) that are kept as such.
MOST_PAIRS = 1 << 10
_PRIME = 1_099_511_628_211


@njit(**COMPILED)  # type: ignore[untyped-decorator]
def intern(text: UInt8Array, start: int, stop: int, store: Store) -> int:
    """Code of a string, the same for equal strings. The caller made room."""
    count, ends, table = store.count, store.string_end, store.string_table
    mask = len(table) - 1
    value = np.int64(1_469_598_103)
    for i in range(start, stop):
        value = (value ^ np.int64(text[i])) * _PRIME
    slot = (value ^ (value >> 29)) & mask
    while table[slot] >= 0:
        code = table[slot]
        low = ends[code - 1] if code > 0 else 0
        if ends[code] - low == stop - start:
            same = True
            for i in range(stop - start):
                if store.characters[low + i] != text[start + i]:
                    same = False
                    break
            if same:
                return code
        slot = (slot + 1) & mask
    code = count[s.C_STRINGS]
    used = count[s.C_CHARACTERS]
    for i in range(stop - start):
        store.characters[used + i] = text[start + i]
    ends[code] = used + stop - start
    table[slot] = code
    count[s.C_CHARACTERS] += stop - start
    count[s.C_STRINGS] += 1
    return code


@njit(**COMPILED)  # type: ignore[untyped-decorator]
def rehash_strings(store: Store) -> None:
    """Fill an empty table of strings anew."""
    mask = len(store.string_table) - 1
    for code in range(store.count[s.C_STRINGS]):
        value = np.int64(1_469_598_103)
        for i in range(store.string_end[code - 1] if code > 0 else 0, store.string_end[code]):
            value = (value ^ np.int64(store.characters[i])) * _PRIME
        slot = (value ^ (value >> 29)) & mask
        while store.string_table[slot] >= 0:
            slot = (slot + 1) & mask
        store.string_table[slot] = code


@njit(**COMPILED)  # type: ignore[untyped-decorator]
def rehash_frames(store: Store) -> None:
    """Fill an empty table of frames anew."""
    for frame in range(store.count[s.C_FRAMES]):
        row = store.frames[frame]
        store.frame_table[_free_slot(store.frame_table, _mix(_mix(row[0], row[1]), row[2]))] = frame


@njit(**COMPILED)  # type: ignore[untyped-decorator]
def rehash_nodes(store: Store) -> None:
    """Fill an empty table of stack nodes anew."""
    for node in range(1, store.count[s.C_NODES]):
        store.node_table[_free_slot(store.node_table, _mix(store.nodes[node, 0], store.nodes[node, 1]))] = node


@njit(**COMPILED)  # type: ignore[untyped-decorator]
def append(store: Store, container: int, start: int, top: int) -> None:
    """Put the words of the stack from ``start`` to ``top`` at the end of a list, tuple or set. A list of frames becomes a node."""
    if start >= top:
        return
    if store.kind[container] == s.LIST and store.first[container] < 0 and frame_of(store, store.stack[start]) >= 0:
        store.kind[container] = s.STACK
        store.first[container] = 0
    if store.kind[container] == s.STACK:
        node = store.first[container]
        for i in range(start, top):
            frame = frame_of(store, store.stack[i])
            if frame >= 0:
                node = _child(store, node, frame)
        store.first[container] = node
    else:
        push_run(store, container, start, top)


@njit(**COMPILED)  # type: ignore[untyped-decorator]
def push_run(store: Store, container: int, start: int, top: int) -> None:
    """Keep words as they are."""
    count = store.count
    used, run = count[s.C_WORDS], count[s.C_RUNS]
    for i in range(start, top):
        store.words[used + i - start] = store.stack[i]
    store.run_start[run] = used
    store.run_length[run] = top - start
    store.run_next[run] = -1
    if store.first[container] < 0:
        store.first[container] = run
    else:
        store.run_next[store.last[container]] = run
    store.last[container] = run
    count[s.C_WORDS] += top - start
    count[s.C_RUNS] += 1


@njit(**COMPILED)  # type: ignore[untyped-decorator]
def set_items(store: Store, container: int, start: int, top: int) -> None:
    """Keys and values from ``start`` to ``top`` into a dict. One with a key ``action`` or ``state`` becomes a record, with ``filename`` a frame."""
    stack = store.stack
    if store.kind[container] == s.DICT:
        record, frame = False, False
        for i in range(start, top, 2):
            record |= stack[i] == (s.W_ACTION << 4 | s.TEXT) or stack[i] == (s.W_STATE << 4 | s.TEXT)
            frame |= stack[i] == (s.W_FILENAME << 4 | s.TEXT)
        if record:
            _become_record(store, container)
        elif frame and store.first[container] < 0:
            _become_frame(store, container, stack, start, top)
            return
    if store.kind[container] == s.RECORD:
        for i in range(start, top, 2):
            _set_field(store, store.first[container], stack[i], stack[i + 1])
    elif store.kind[container] == s.DICT:
        push_run(store, container, start, top)


@njit(**COMPILED)  # type: ignore[untyped-decorator]
def _become_record(store: Store, container: int) -> None:
    row = store.count[s.C_RECORDS]
    store.count[s.C_RECORDS] += 1
    store.numbers[row, :] = s.NULL
    store.codes[row, :] = -1
    run = store.first[container]
    while run >= 0:
        low = store.run_start[run]
        for i in range(low, low + store.run_length[run] - 1, 2):
            _set_field(store, row, store.words[i], store.words[i + 1])
        run = store.run_next[run]
    store.kind[container] = s.RECORD
    store.first[container] = row


@njit(**COMPILED)  # type: ignore[untyped-decorator]
def _set_field(store: Store, row: int, key: int, value: int) -> None:
    if key & 15 != s.TEXT:
        return
    name, kind, content = key >> 4, value & 15, value >> 4
    if kind == s.INT:
        if name == s.W_ADDR or name == s.W_ADDRESS or name == s.W_DEVICE_FREE:
            store.numbers[row, s.PLACE] = content
        elif name == s.W_SIZE:
            store.numbers[row, s.AMOUNT] = content
        elif name == s.W_TIME or name == s.W_REQUESTED:
            store.numbers[row, s.WHEN] = content
    elif kind == s.TEXT:
        if name == s.W_ACTION or name == s.W_STATE:
            store.codes[row, s.WORD] = content
        elif name == s.W_METADATA:
            store.codes[row, s.METADATA] = content
    elif kind == s.CONTAINER:
        if name == s.W_FRAMES:
            _set_stack(store, row, content)
        elif name == s.W_POOL and store.kind[content] == s.PAIR:
            store.codes[row, s.POOL] = store.first[content]
        elif name == s.W_HISTORY and store.kind[content] == s.LIST and store.last[content] >= 0:
            run = store.last[content]
            newest = store.words[store.run_start[run] + store.run_length[run] - 1]
            if newest & 15 == s.CONTAINER and store.kind[newest >> 4] == s.DICT:
                frames = _get(store, newest >> 4, s.W_FRAMES)
                if frames & 15 == s.CONTAINER:
                    _set_stack(store, row, frames >> 4)


@njit(**COMPILED)  # type: ignore[untyped-decorator]
def _set_stack(store: Store, row: int, container: int) -> None:
    if store.kind[container] == s.STACK:
        store.codes[row, s.STACK_OF] = store.first[container]
    elif store.kind[container] == s.LIST:
        store.codes[row, s.STACK_OF] = 0


@njit(**COMPILED)  # type: ignore[untyped-decorator]
def _get(store: Store, container: int, name: int) -> int:
    """Word of a key of a dict that is kept as it is; NONE where it has none."""
    found = s.NONE
    run = store.first[container]
    while run >= 0:
        low = store.run_start[run]
        for i in range(low, low + store.run_length[run] - 1, 2):
            if store.words[i] == (name << 4 | s.TEXT):
                found = store.words[i + 1]
        run = store.run_next[run]
    return found


@njit(**COMPILED)  # type: ignore[untyped-decorator]
def frame_of(store: Store, word: int) -> int:
    """The frame that a word stands for, a dict that grew key by key included; -1 for anything else."""
    if word & 15 != s.CONTAINER:
        return -1
    container = word >> 4
    if store.kind[container] == s.DICT and store.first[container] >= 0:
        name = _get(store, container, s.W_FILENAME)
        if name & 15 != s.TEXT:
            return -1
        line, function = _get(store, container, s.W_LINE), _get(store, container, s.W_NAME)
        store.first[container] = _frame(
            store, name >> 4, line >> 4 if line & 15 == s.INT else 0, function >> 4 if function & 15 == s.TEXT else 0
        )
        store.kind[container] = s.FRAME
    return store.first[container] if store.kind[container] == s.FRAME else -1


@njit(**COMPILED)  # type: ignore[untyped-decorator]
def _become_frame(store: Store, container: int, stack: s.Int64Array, start: int, top: int) -> None:
    file, line, name = 0, 0, 0
    for i in range(start, top, 2):
        kind, content = stack[i + 1] & 15, stack[i + 1] >> 4
        if stack[i] == (s.W_FILENAME << 4 | s.TEXT) and kind == s.TEXT:
            file = content
        elif stack[i] == (s.W_NAME << 4 | s.TEXT) and kind == s.TEXT:
            name = content
        elif stack[i] == (s.W_LINE << 4 | s.TEXT) and kind == s.INT:
            line = content
    store.first[container] = _frame(store, file, line, name)
    store.kind[container] = s.FRAME


@njit(**COMPILED)  # type: ignore[untyped-decorator]
def _frame(store: Store, file: int, line: int, name: int) -> int:
    line = min(max(line, -1), 2**31 - 1)
    table = store.frame_table
    mask = len(table) - 1
    slot = _mix(_mix(file, line), name) & mask
    while table[slot] >= 0:
        row = store.frames[table[slot]]
        if row[0] == file and row[1] == line and row[2] == name:
            return table[slot]
        slot = (slot + 1) & mask
    number = store.count[s.C_FRAMES]
    store.frames[number, 0], store.frames[number, 1], store.frames[number, 2] = file, line, name
    table[slot] = number
    store.count[s.C_FRAMES] += 1
    return number


@njit(**COMPILED)  # type: ignore[untyped-decorator]
def _child(store: Store, node: int, frame: int) -> int:
    """The node of a stack with one frame more behind it."""
    table = store.node_table
    mask = len(table) - 1
    slot = _mix(node, frame) & mask
    while table[slot] >= 0:
        known = table[slot]
        if store.nodes[known, 0] == node and store.nodes[known, 1] == frame:
            return known
        slot = (slot + 1) & mask
    number = store.count[s.C_NODES]
    store.nodes[number, 0], store.nodes[number, 1] = node, frame
    table[slot] = number
    store.count[s.C_NODES] += 1
    return number


@njit(**COMPILED)  # type: ignore[untyped-decorator]
def pair_of_numbers(store: Store, start: int) -> int:
    """Code of two numbers on the stack; -1 where they are none, or where there are too many different ones."""
    one, two = store.stack[start], store.stack[start + 1]
    if one & 15 != s.INT or two & 15 != s.INT:
        return -1
    known = store.count[s.C_PAIRS]
    for code in range(known):
        if store.pairs[code, 0] == one >> 4 and store.pairs[code, 1] == two >> 4:
            return code
    if known >= MOST_PAIRS:
        return -1
    store.pairs[known, 0], store.pairs[known, 1] = one >> 4, two >> 4
    store.count[s.C_PAIRS] += 1
    return known


@njit(**COMPILED)  # type: ignore[untyped-decorator]
def _mix(a: int, b: int) -> int:
    value = (np.int64(a) * 1_000_003) ^ np.int64(b)
    value *= _PRIME
    return (value ^ (value >> 31)) & 0x7FFFFFFFFFFFFFFF


@njit(**COMPILED)  # type: ignore[untyped-decorator]
def _free_slot(table: s.Int32Array, value: int) -> int:
    slot = value & (len(table) - 1)
    while table[slot] >= 0:
        slot = (slot + 1) & (len(table) - 1)
    return slot
