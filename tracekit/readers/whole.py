"""A small file as bytes at once, unpacked, never more than a limit: for what is no stream of events."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import BinaryIO

from tracekit.errors import InputError
from tracekit.readers.compressed import TextStream

_BLOCK = 1 << 20


def head_of(opener: Callable[[], BinaryIO], size: int) -> bytes:
    """The first unpacked bytes. Raises one of ``recognise.read_errors()``."""
    head = bytearray(size)
    with opener() as raw, closing(TextStream(raw, threaded=False)) as stream:
        return bytes(head[: stream.fill(memoryview(head))])


def read_whole(name: str, opener: Callable[[], BinaryIO], most: int, remedy: str) -> bytes:
    """All unpacked bytes of a file. Raises InputError for more than ``most``, and for a packing that is damaged."""
    data = bytearray()
    block = memoryview(bytearray(min(_BLOCK, most + 1)))
    with opener() as raw, closing(TextStream(raw, threaded=False)) as stream:
        while count := stream.fill(block):
            data += block[:count]
            if len(data) > most:
                raise InputError(f"{name} holds more than {most:,} bytes: that is not what it is taken for", remedy)
        if stream.damage:
            raise InputError(f"{name}: the packed file is damaged ({stream.damage})", remedy)
    return bytes(data)
