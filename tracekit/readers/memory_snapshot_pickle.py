"""Pickles of plain containers, read without Python's unpickler: nothing is imported, nothing is called, memory is bounded.

Numbers, strings, None and booleans in lists, dicts, tuples and sets are all that a memory snapshot holds. A pickle that wants anything else
is refused, with the name of what it wanted.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numba import njit

from tracekit.compiled import COMPILED, KEPT
from tracekit.errors import InputError
from tracekit.readers import lex
from tracekit.readers import memory_snapshot_machine as machine
from tracekit.readers import memory_snapshot_pack as pack
from tracekit.readers import memory_snapshot_store as s
from tracekit.readers.compressed import TextStream
from tracekit.readers.entry import sources_digest
from tracekit.readers.memory_snapshot_store import Reading, Store
from tracekit.trace.events import UInt8Array

CHUNK = 1 << 22
#: What is read may take this many times the bytes read so far, and a fixed amount; a snapshot takes 1 to 2 times.
_MOST_TIMES, _FREE_BYTES = 3, 1 << 26
_REMEDY = "give the file that torch.cuda.memory._dump_snapshot() wrote"
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


class _Compiled(NamedTuple):
    """Entry points; texts and control blocks are addresses."""

    run: Callable[[int, int, int, int], int]
    intern: Callable[[int, int, int, int], int]
    rehash: Callable[[int, int], int]


@functools.cache
def _compiled() -> _Compiled:
    """The entry points, out of numba's cache or compiled now (some seconds). They enclose a digest of all sources: see readers/entry.py."""
    digest = _digest()
    try:
        if KEPT:
            return _entries(digest, cache=True)
    except (OSError, EOFError, pickle.UnpicklingError):  # a full disk, a damaged cache
        pass
    return _entries(digest, cache=False)


def _digest() -> int:
    return sources_digest(lex, s, pack, machine)


def _entries(digest: int, cache: bool) -> _Compiled:
    n = "int64"
    options = {**COMPILED, "cache": cache}

    @njit(f"{n}({n}, {n}, {n}, {n})", **options)
    def run(text, end, sizes, control):  # type: ignore[no-untyped-def]
        return digest if end < 0 else machine.run(text, end, sizes, control)

    @njit(f"{n}({n}, {n}, {n}, {n})", **options)
    def intern(text, start, length, control):  # type: ignore[no-untyped-def]
        return digest if length < 0 else pack.intern(text, start, length, control)

    @njit(f"{n}({n}, {n})", **options)
    def rehash(control, part):  # type: ignore[no-untyped-def]
        pack.rehash(control, part)
        return digest

    return _Compiled(run, intern, rehash)


def read_pickle(stream: TextStream, name: str) -> Reading:
    """The one value of a pickle. Raises InputError, one line that begins with ``name``, where it holds anything but plain values."""
    compiled, store = _compiled(), Store()
    for text in (np.frombuffer(word.encode(), np.uint8) for word in s.WORDS):
        compiled.intern(text.ctypes.data, 0, len(text), store.address)
    text, filled, taken = np.empty(CHUNK, np.uint8), 0, 0
    while True:
        status = compiled.run(text.ctypes.data, filled, machine.SIZES.ctypes.data, store.address)
        position = int(store.control[s.POSITION])
        if taken == position == 0 and bytes(text[:2]) == b"PK" and filled > 1:
            raise InputError(f"{name} is a zip archive (torch.save writes them), not a memory snapshot", _REMEDY)
        if status == machine.ROOM:
            _make_room(store, compiled, taken + filled, name)
        elif status == machine.MORE:
            text, filled, read = _refilled(stream, text, filled, position)
            taken, store.control[s.POSITION] = taken + position, 0
            if not read:
                raise InputError(f"{name} is truncated: the pickle has no end", f"copy the file anew, or {_REMEDY}")
        elif status == machine.DONE:
            return Reading(store, int(store.array(s.STACK_, s.DEPTH)[0]))
        elif status == machine.REFUSED:
            raise _refusal(name, text[position:filled], store)
        else:
            raise InputError(f"{name} is not a pickle, or a damaged one (at byte {taken + position})", _REMEDY)


def _make_room(store: Store, compiled: _Compiled, read: int, name: str) -> None:
    part = int(store.control[s.SHORT])
    if store.grow(part, int(store.control[s.SHORT_BY])):
        compiled.rehash(store.address, part)
    if store.bytes > _MOST_TIMES * read + _FREE_BYTES:
        raise InputError(f"{name} holds far more objects than a memory snapshot of its size", _REMEDY)


def _refilled(stream: TextStream, text: UInt8Array, filled: int, position: int) -> tuple[UInt8Array, int, int]:
    """(text, filled, bytes read): what is left of the text moved to its beginning, more read behind it."""
    left = filled - position
    if left > len(text) // 2:
        larger = np.empty(2 * len(text), np.uint8)
        larger[:left] = text[position:filled]
        text = larger
    else:
        text[:left] = text[position:filled].copy()
    read = stream.fill(memoryview(text)[left:])  # type: ignore[arg-type]
    return text, left + read, read


def _refusal(name: str, text: UInt8Array, store: Store) -> InputError:
    """Why a pickle is refused; what it wanted is named where it says so."""
    op = int(text[0])
    wanted = ""
    if op in (0x63, 0x69):
        lines = text[1:400].tobytes().split(b"\n")
        wanted = b".".join(lines[:2]).decode("utf-8", "replace")
    elif op == 0x93:
        reading = Reading(store, 0)
        wanted = ".".join(filter(None, (reading.text(int(word)) for word in store.array(s.STACK_, s.DEPTH)[-2:])))
    if wanted:
        shown = "".join(c if c.isprintable() else "?" for c in wanted)[:120]
        return InputError(f"{name} was not opened: the pickle wants {shown}, which a memory snapshot never does", _REMEDY)
    return InputError(f"{name} was not opened: the pickle {_WHAT.get(op, 'makes an object')}, which a memory snapshot never does", _REMEDY)
