"""Pickles of plain containers, read without Python's unpickler: nothing is imported, nothing is called, memory is bounded.

Numbers, strings, None and booleans in lists, dicts, tuples and sets are all that a memory snapshot holds. A pickle that wants anything else
is refused, with the name of what it wanted.
"""

from __future__ import annotations

import numpy as np

from tracekit.errors import InputError
from tracekit.readers import memory_snapshot_machine as machine
from tracekit.readers import memory_snapshot_store as s
from tracekit.readers.compressed import TextStream
from tracekit.readers.memory_snapshot_pack import intern, rehash_frames, rehash_nodes, rehash_strings
from tracekit.readers.memory_snapshot_store import Reading, Store
from tracekit.trace.events import UInt8Array

CHUNK = 1 << 22
#: What is read may take this many times the bytes read so far, and a fixed amount; a snapshot takes 1 to 2 times.
_MOST_TIMES, _FREE_BYTES = 3, 1 << 26
_REMEDY = "give the file that torch.cuda.memory._dump_snapshot() wrote"
_REHASH = {s.C_STRINGS: rehash_strings, s.C_FRAMES: rehash_frames, s.C_NODES: rehash_nodes}
_WHAT = {
    0x52: "calls a function",
    0x62: "sets the state of an object",
    0x69: "makes an object",
    0x6F: "makes an object",
    0x81: "makes an object",
    0x92: "makes an object",
    0x82: "asks for a registered extension",
    0x83: "asks for a registered extension",
    0x84: "asks for a registered extension",
    0x50: "asks for an object from outside",
    0x51: "asks for an object from outside",
    0x96: "holds a byte array",
    0x97: "asks for a buffer from outside",
    0x98: "asks for a buffer from outside",
}


def read_pickle(stream: TextStream, name: str) -> Reading:
    """The one value of a pickle. Raises InputError, one line that begins with ``name``, where it holds anything but plain values."""
    store, text, filled, taken = _with_words(s.new_store()), np.empty(CHUNK, np.uint8), 0, 0
    while True:
        status = machine.run(text, filled, store)
        if status == machine.ROOM:
            store = _more_room(store, taken + filled, name)
        elif status == machine.MORE:
            text, filled, taken, read = _refilled(stream, text, filled, int(store.count[s.C_POSITION]), taken)
            store.count[s.C_POSITION] = 0
            if not read:
                raise InputError(f"{name} is truncated: the pickle has no end", f"copy the file anew, or {_REMEDY}")
        elif status == machine.DONE:
            return Reading(store, int(store.stack[0]))
        elif status == machine.REFUSED:
            raise _refusal(name, text[int(store.count[s.C_POSITION]) : filled], store)
        else:
            place = taken + int(store.count[s.C_POSITION])
            raise InputError(f"{name} is not a pickle, or a damaged one (at byte {place})", _REMEDY)


def _with_words(store: Store) -> Store:
    """A store that knows the words of snapshots by their fixed codes."""
    for word in s.WORDS:
        text = np.frombuffer(word.encode(), np.uint8)
        intern(text, 0, len(text), store)
    return store


def _more_room(store: Store, read: int, name: str) -> Store:
    part = int(store.count[s.C_SHORT])
    tables = {key: getattr(store, table) for key, table in s.TABLES.items()}
    store = s.grow(store, part, int(store.count[s.C_OPERAND]))
    if part in tables and getattr(store, s.TABLES[part]) is not tables[part]:
        _REHASH[part](store)
    if s.used_bytes(store) > _MOST_TIMES * read + _FREE_BYTES:
        raise InputError(f"{name} holds far more objects than a memory snapshot of its size", _REMEDY)
    return store


def _refilled(stream: TextStream, text: UInt8Array, filled: int, position: int, taken: int) -> tuple[UInt8Array, int, int, int]:
    """(text, filled, bytes taken before it, bytes read): what is left of the text moved to its beginning, more read behind it."""
    left = filled - position
    if left > len(text) // 2:
        larger = np.empty(2 * len(text), np.uint8)
        larger[:left] = text[position:filled]
        text = larger
    else:
        text[:left] = text[position:filled].copy()
    read = stream.fill(memoryview(text)[left:])
    return text, left + read, taken + position, read


def _refusal(name: str, text: UInt8Array, store: Store) -> InputError:
    """Why a pickle is refused; what it wanted is named where it says so."""
    op = int(text[0])
    wanted = ""
    if op in (0x63, 0x69):
        lines = text[1:400].tobytes().split(b"\n")
        wanted = b".".join(lines[:2]).decode("utf-8", "replace")
    elif op == 0x93 and store.count[s.C_DEPTH] >= 2:
        reading = Reading(store, 0)
        top = int(store.count[s.C_DEPTH])
        wanted = ".".join(reading.text(int(word)) for word in store.stack[top - 2 : top])
    if wanted:
        shown = "".join(c if c.isprintable() else "?" for c in wanted)[:120]
        return InputError(f"{name} was not opened: the pickle wants {shown}, which a memory snapshot never does", _REMEDY)
    return InputError(f"{name} was not opened: the pickle {_WHAT.get(op, 'makes an object')}, which a memory snapshot never does", _REMEDY)
