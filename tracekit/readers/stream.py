"""The text of a trace through a few parsing threads, in bounded memory, in the order of the file.

The reader cuts the text into buffers at what looks like the start of an event. That is a guess (a string may hold such text), so
a parsed buffer counts only if the one before it ended exactly there; otherwise its result is thrown away and the text is parsed
again, joined to what was left over. Guesses that fail, and events that are no JSON, so cost time, never rows.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tracekit.readers import scan
from tracekit.readers.compressed import BOM, TextStream
from tracekit.readers.entry import entries
from tracekit.readers.lex import PAD
from tracekit.readers.worker import COUNTS, Block, Parsed, RepairWork, Worker
from tracekit.units import plural

CHUNK = 4 << 20
#: An event that is longer than this is not read, and neither is what follows it. The same holds for the text before the first event.
LONGEST = 64 << 20
TOO_LONG = f"an event is longer than {LONGEST >> 20} MB: reading stopped there"
#: Text after the list of events that is kept for its metadata; no more than this is read behind the list.
LONGEST_TAIL = 64 << 20

#: The start of an event, and what may be one in a file that begins its events with a rarer key.
_START = re.compile(rb'\}\s*,\s*(\{)\s*"(?:ph|name|cat|pid|ts|args|tid)"')
_ANY_START = re.compile(rb'\}\s*,\s*(\{)\s*"[A-Za-z_]{1,32}"\s*:')
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_NOTHING = b" \t\r\n,\x00"


@dataclass
class StreamSummary:
    """What the text outside the events was, and how reading it went."""

    head: bytes = b""
    tail: bytes = b""
    bare_list: bool = False
    found: bool = False  # a list of events was found
    head_is_cut: bool = False  # the text ended before a list of events, in the middle of a value
    truncated: bool = False
    gave_up: str = ""  # why what follows was not read, a sentence
    bytes_read: int = 0
    rows: int = 0
    repairs: Counter[str] = field(default_factory=Counter)
    counts: Any = field(default_factory=lambda: np.zeros(COUNTS.stop - COUNTS.start, np.int64))


@dataclass
class _Job:
    """A buffer that a worker is parsing."""

    future: Future[Parsed]
    worker: int
    text: memoryview


class EventStream:
    """Reads one text; ``blocks()`` yields (worker, block) in file order, after which ``summary`` is complete."""

    def __init__(self, stream: TextStream, workers: list[Worker], chunk: int = CHUNK) -> None:
        self._stream = stream
        self._workers = workers
        self._chunk = chunk
        self._ended = False
        self._carry = b""  # text that follows what was accepted so far, not yet parsed for good
        self._offset = 0  # where the next buffer begins [bytes behind the first event]
        self._repairs = RepairWork()
        self._finished = False  # the list of events was closed
        self._left_off = ""  # why the text was not read to its end
        self.summary = StreamSummary()

    def blocks(self) -> Iterator[tuple[int, Block]]:
        """All blocks of all events."""
        text = self._to_first_event()
        if text is None:
            return
        pool = ThreadPoolExecutor(len(self._workers))
        free = deque(range(len(self._workers)))
        running: deque[_Job] = deque()
        try:
            for parsed in self._buffers(text):
                if self._is_over():
                    while running:
                        yield from self._accept(running.popleft())
                    self._keep_tail(bytes(parsed))
                    break
                if not free:
                    job = running.popleft()
                    yield from self._accept(job)
                    free.append(job.worker)
                worker = free.popleft()
                running.append(_Job(pool.submit(self._parse, worker, parsed), worker, parsed))
            while running:
                yield from self._accept(running.popleft())
            yield from self._finish()
        finally:
            pool.shutdown(cancel_futures=True)

    def _is_over(self) -> bool:
        return self._finished or bool(self.summary.gave_up)

    def _parse(self, worker: int, text: memoryview) -> Parsed:
        """``text`` is a slice of a padded buffer: the padding is behind its end."""
        base = _array(text)
        begin = _offset(text, base)
        return self._workers[worker].parse(base, begin, begin + len(text))

    def _accept(self, job: _Job) -> Iterator[tuple[int, Block]]:
        """Take a worker's result if the text before it ended cleanly, else parse the left-over and this text together."""
        parsed = job.future.result()
        if self._is_over():
            self._keep_tail(bytes(job.text))
            return
        start = self._offset
        self._offset += len(job.text)
        if self._carry:
            yield from self._again(job.worker, self._carry + bytes(job.text), start - len(self._carry), final=False)
            return
        yield from self._taken(job.worker, parsed)
        begin = _offset(job.text, _array(job.text))
        rest = bytes(job.text[parsed.position - begin :])
        if parsed.stopped == scan.END:
            self._finished = True
            self._keep_tail(rest)
        elif parsed.stopped == scan.SYNTAX:
            yield from self._again(job.worker, rest, self._offset - len(rest), final=False)
        else:
            self._carry = rest.lstrip(_NOTHING)

    def _again(self, worker: int, text: bytes, start: int, final: bool) -> Iterator[tuple[int, Block]]:
        """Parse ``text``, which begins at the offset ``start``, and repair what is broken in it."""
        parsed = self._workers[worker].parse_tolerant(text, final, self._repairs, start)
        yield from self._taken(worker, parsed)
        rest = text[parsed.position :]
        if parsed.stopped == scan.END:
            self._finished = True
            self._carry = b""
            self._keep_tail(rest)
        else:
            self._carry = rest.lstrip(_NOTHING)  # what ends it may belong to a name that is cut here
            if parsed.stopped == scan.SYNTAX:
                self.summary.gave_up = (
                    f"{plural(self.summary.repairs.total(), 'broken event')} had to be repaired or skipped and there are more: "
                    "reading stopped there; profile again, or have the file written anew as valid JSON"
                )
            elif len(self._carry) > LONGEST:
                self.summary.gave_up = TOO_LONG

    def _taken(self, worker: int, parsed: Parsed) -> Iterator[tuple[int, Block]]:
        self.summary.counts += parsed.counts
        self.summary.repairs += parsed.repairs
        self.summary.rows += sum(map(len, parsed.blocks))
        for block in parsed.blocks:
            yield worker, block

    def _finish(self) -> Iterator[tuple[int, Block]]:
        """What is left when the text has ended: repair what can be, then it was cut off or complete."""
        if not self._finished:
            self.summary.gave_up = self.summary.gave_up or self._left_off
        while (before := self._carry.rstrip(_NOTHING)) and not self._is_over():
            yield from self._again(0, before, self._offset - len(self._carry), final=True)
            if self._carry == before:
                break
        self.summary.truncated = not self._finished
        if self._finished:
            self._drain_tail()

    def _keep_tail(self, text: bytes) -> None:
        if self._finished and len(self.summary.tail) < LONGEST_TAIL:
            self.summary.tail += text

    def _drain_tail(self) -> None:
        buffer = bytearray(CHUNK)
        while not self._ended and len(self.summary.tail) < LONGEST_TAIL:
            count = self._fill(memoryview(buffer))
            self._keep_tail(bytes(memoryview(buffer)[:count]))

    # ---- text ---------------------------------------------------------------------------------------------------------

    def _fill(self, target: memoryview) -> int:
        count = self._stream.fill(target)
        self.summary.bytes_read += count
        if count < len(target):
            self._ended = True
        return count

    def _to_first_event(self) -> memoryview | None:
        """Read the head of the file; the text from the first event on, None when there is no list of events."""
        size = self._chunk
        buffer: Any = np.zeros(size + PAD, np.uint8)
        used = self._fill(memoryview(buffer)[:size])
        start = 3 if bytes(buffer[:3]) == BOM else 0
        while True:
            at = int(entries().find_events(buffer.ctypes.data, start, used))
            if at >= 0 or at == -2 or self._ended or size >= LONGEST:
                break
            larger: Any = np.zeros(2 * size + PAD, np.uint8)
            larger[:used] = buffer[:used]
            buffer, size = larger, 2 * size
            used += self._fill(memoryview(buffer)[used:size])
        self.summary.head_is_cut = at == -1
        if at < 0:
            found = _EVENTS.search(bytes(buffer[:used]))  # the text before it may be no JSON
            at = found.end() if found is not None else -1
        self.summary.head = bytes(buffer[: at if at >= 0 else used])
        self.summary.found = at >= 0
        self.summary.bare_list = at >= 0 and self.summary.head[start:].strip() == b"["
        return memoryview(buffer)[at:used] if at >= 0 else None

    def _buffers(self, text: memoryview) -> Iterator[memoryview]:
        """The text in buffers, each but the last cut at what looks like the start of an event."""
        while True:
            if self._ended:
                yield text
                return
            cut = _last_start(text)
            rest = text[cut:] if cut else text
            buffer: Any = np.empty(len(rest) + self._chunk + PAD, np.uint8)
            buffer[: len(rest)] = np.frombuffer(rest, np.uint8)
            if cut:
                _clear_behind(text, cut)
                yield text[:cut]
            elif len(text) > LONGEST:
                self._left_off = TOO_LONG
                yield text  # for the events before the long one
                return
            used = len(rest) + self._fill(memoryview(buffer)[len(rest) : len(rest) + self._chunk])
            buffer[used : used + PAD] = 0
            text = memoryview(buffer)[:used]


def _array(text: memoryview) -> Any:
    """The whole padded buffer that a slice was cut from."""
    return np.frombuffer(text.obj, np.uint8)  # type: ignore[call-overload]


def _offset(text: memoryview, base: Any) -> int:
    """Where a slice begins in the array it was cut from."""
    return int(np.frombuffer(text, np.uint8).__array_interface__["data"][0] - base.__array_interface__["data"][0]) if len(text) else 0


def _clear_behind(text: memoryview, cut: int) -> None:
    """Zeros behind a cut: the parser of the first part may look PAD bytes beyond it. (The rest was copied already.)"""
    padded = np.frombuffer(text, np.uint8)
    padded[cut : cut + PAD] = 0


def _last_start(text: memoryview) -> int:
    """Offset of the last ``{`` that looks like the start of an event; 0 when there is none. Looks back in growing windows."""
    for pattern in (_START, _ANY_START):
        window = 1 << 14
        while True:
            low = max(0, len(text) - window)
            starts = [found.start(1) for found in pattern.finditer(text[low:])]
            if starts:
                return low + starts[-1]
            if not low:
                break
            window *= 8
    return 0
