"""Bytes of a trace whatever they are packed in: plain, gzip (several members, packed twice), zstd.

The first bytes tell, never the file's name. A damage ends the text, behind everything that could be unpacked before it, and so does a file
that unpacks to far more than any trace does.
"""

from __future__ import annotations

import io
import os
import queue
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any, BinaryIO

from tracekit.readers import zstd

GZIP, ZSTD, BOM = b"\x1f\x8b", zstd.MAGIC, b"\xef\xbb\xbf"
#: A trace packed more often than this is not a trace.
LAYERS = 3
#: Unpacked bytes that are not questioned, and how many times the stored bytes a trace may unpack to beyond them (it is 10 to 30 times).
TRUSTED, MOST_TIMES = 1 << 30, 250


class TextStream:
    """The unpacked bytes, read into buffers. ``damage`` says why it ended early, '' when it did not.

    ``progress`` is called with the number of stored bytes that were taken since the last call.
    """

    def __init__(self, raw: BinaryIO, progress: Callable[[int], None] | None = None, threaded: bool | None = None) -> None:
        """``threaded``: unpack gzip on a thread of its own; by default where more than two processors are at hand."""
        self._counted = _Counted(raw)
        self._progress = progress
        self._reported = 0
        self.damage = ""
        threaded = _processors() > 2 if threaded is None else threaded
        self._stream: Any = io.BufferedReader(self._counted, 1 << 20)
        for layer in range(LAYERS + 1):
            magic = self._peek()
            if magic.startswith(GZIP) and layer < LAYERS:
                self._stream = self._gunzipped(threaded and layer == 0)
            elif magic.startswith(ZSTD) and layer < LAYERS:
                self._stream = self._unzstd()
            else:
                break

    def _damaged(self, what: str) -> None:
        self.damage = self.damage or what

    def _is_too_much(self, unpacked: int) -> bool:
        """Whether a layer unpacked too much for a trace: then its end is as good as any."""
        too_much = unpacked > max(TRUSTED, MOST_TIMES * self._counted.taken)
        if too_much:
            self._damaged(f"it unpacks to more than {MOST_TIMES} times its size")
        return too_much

    def _peek(self) -> bytes:
        try:
            return bytes(self._stream.peek(4)[:4])
        except OSError as error:
            self._damaged(f"reading failed: {_reason(error)}")
            return b""

    def _gunzipped(self, threaded: bool) -> Any:
        return io.BufferedReader(Gunzip(self._stream, threaded, self._damaged, self._is_too_much), 1 << 20)

    def _unzstd(self) -> Any:
        return io.BufferedReader(_Blocks(self._stream, zstd.blocks(self._stream, self._damaged, self._is_too_much)), 1 << 20)

    def fill(self, target: memoryview) -> int:
        """Read until ``target`` is full or the stream ends; returns the number of bytes."""
        done = 0
        while done < len(target):
            try:
                count = self._stream.readinto1(target[done:])  # readinto would lose what it has when it fails
            except OSError as error:
                self._damaged(f"reading failed: {_reason(error)}")
                break
            if not count:
                break
            done += count
        if self._progress is not None:
            taken = self._counted.taken
            self._progress(taken - self._reported)
            self._reported = taken
        return done

    def close(self) -> None:
        """Close the file."""
        try:
            self._stream.close()
        except (OSError, ValueError):
            self._counted.close()


def _reason(error: Exception) -> str:
    """One line, without a path."""
    return " ".join(str(getattr(error, "strerror", None) or error).split())[:120]


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Counted(io.RawIOBase):
    """The stored bytes, counted."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self.taken = 0

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, target: Any) -> int:
        """Fill the start of ``target``; 0 at the end."""
        if hasattr(self._raw, "readinto"):
            count = self._raw.readinto(target) or 0
        else:
            data = self._raw.read(len(target))
            count = len(data)
            target[:count] = data
        self.taken += count
        return count

    def close(self) -> None:
        """Close this layer and what is below it."""
        if not self.closed:
            self._raw.close()
        super().close()


class _Blocks(io.RawIOBase):
    """A layer that is unpacked block by block."""

    def __init__(self, packed: Any, blocks: Generator[bytes, None, None]) -> None:
        self._packed = packed
        self._rest = memoryview(b"")
        self._blocks = blocks

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, target: Any) -> int:
        """Fill the start of ``target``; 0 at the end."""
        if not len(self._rest):
            self._rest = memoryview(next(self._blocks, b""))
        count = min(len(target), len(self._rest))
        target[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    def close(self) -> None:
        """Close this layer and what is below it."""
        if not self.closed:
            self._blocks.close()
            self._packed.close()
        super().close()


class Gunzip(_Blocks):
    """Members of a gzip stream, one after the other; with ``threaded`` unpacked on a thread of its own, a few blocks ahead.

    A damage ends the stream and is told to ``damaged``; the readers of the gzip and isal modules raise instead, and what a buffer held by
    then is lost. Bytes behind the last member that start no other are ignored, as gzip does.
    """

    _BLOCK = 1 << 20
    _AHEAD = 8

    def __init__(self, packed: Any, threaded: bool, damaged: Callable[[str], None], is_too_much: Callable[[int], bool]) -> None:
        self._damaged = damaged
        self._is_too_much = is_too_much
        self._packed = packed
        super().__init__(packed, self._ahead(self._unpacked()) if threaded else self._unpacked())

    def _unpacked(self) -> Generator[bytes, None, None]:
        from isal import isal_zlib

        data = b""
        members = unpacked = 0
        while True:
            data = data or self._packed.read1(self._BLOCK)
            if not data or (members and not data.startswith(GZIP[: len(data)])):
                return
            members += 1
            member = isal_zlib.decompressobj(wbits=31)
            while not member.eof:
                data = data or self._packed.read1(self._BLOCK)
                if not data:
                    self._damaged(zstd.CUT)
                    return
                try:
                    block = member.decompress(data, self._BLOCK)
                except isal_zlib.error as error:  # type: ignore[misc]
                    self._damaged(f"the compressed stream is damaged: {_reason(error)}")
                    return
                data = member.unconsumed_tail
                unpacked += len(block)
                if self._is_too_much(unpacked + 1000 * members):
                    return
                if block:
                    yield block
            data = member.unused_data

    def _ahead(self, blocks: Iterator[bytes]) -> Generator[bytes, None, None]:
        """The same blocks, made by a thread."""
        ready: queue.Queue[bytes | None] = queue.Queue(self._AHEAD)
        stop = threading.Event()

        def pump() -> None:
            try:
                for block in blocks:
                    if not _put(ready, block, stop):
                        return
            except OSError as error:
                self._damaged(f"reading failed: {_reason(error)}")
            finally:
                _put(ready, None, stop)

        thread = threading.Thread(target=pump, daemon=True)
        thread.start()
        try:
            while (item := ready.get()) is not None:
                yield item
        finally:
            stop.set()
            thread.join()


def _put(ready: queue.Queue[Any], item: Any, stop: threading.Event) -> bool:
    """Put, unless nobody waits for it any more."""
    while not stop.is_set():
        try:
            ready.put(item, timeout=0.05)
        except queue.Full:
            continue
        return True
    return False
