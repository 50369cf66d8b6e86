"""torch's raw memory timelines (``export_memory_timeline`` to a ``.raw.json.gz``): rows of [time, action, bytes, category]."""

from __future__ import annotations

import re
from contextlib import closing

import msgspec
import numpy as np

from tracekit.errors import InputError
from tracekit.memory.blocks import MOST_BYTES
from tracekit.readers.compressed import TextStream
from tracekit.readers.recognise import read_errors, reason
from tracekit.readers.sources import Source, clean
from tracekit.trace.events import Int64Array

_HEAD = re.compile(rb"\s*\[\s*\[\s*-?[0-9]+\s*,")
#: Rows become Python numbers first, in several times the size of their text.
_MOST_BYTES = 1 << 28
_REMEDY = "write it anew with export_memory_timeline(path ending in .raw.json.gz)"


def looks_like_timeline(source: Source) -> bool:
    """Whether a file begins as such rows do; False also where it cannot be read."""
    try:
        with source.open() as raw, closing(TextStream(raw)) as stream:
            head = bytearray(256)
            return _HEAD.match(bytes(head[: stream.fill(memoryview(head))])) is not None
    except read_errors():
        return False


def read_timeline(source: Source) -> Int64Array:
    """The rows as an array of four columns. Raises InputError, one line, where it is something else."""
    name = clean(source.name)
    text = bytearray()
    try:
        with source.open() as raw, closing(TextStream(raw)) as stream:
            block = memoryview(bytearray(1 << 20))
            while (count := stream.fill(block)) and len(text) <= _MOST_BYTES:
                text += block[:count]
    except read_errors() as error:
        raise InputError(f"{name}: cannot be read ({reason(error)})", "check the file and its permissions") from error
    if len(text) > _MOST_BYTES:
        raise InputError(f"{name} is a memory timeline of more than {_MOST_BYTES >> 20} MiB", "record fewer steps")
    try:
        rows = msgspec.json.decode(bytes(text), type=list[tuple[int, int, int, int]])
        found = np.array(rows, np.int64).reshape(-1, 4)
    except (msgspec.DecodeError, RecursionError, OverflowError) as error:
        raise InputError(f"{name} is not a raw memory timeline ({error})", _REMEDY) from error
    if (np.abs(found[:, 2]) >= MOST_BYTES).any():
        raise InputError(f"{name} is not a raw memory timeline (it has sizes that cannot be true)", _REMEDY)
    return found
