"""The history of the CUDA allocator during the window: bounded in bytes, and written beside the job, not in its way.

The allocator keeps its events in a ring of entries. What an entry weighs depends on how deep the program calls: about 136 bytes
(``TraceEntry`` in c10/core/CachingDeviceAllocator.h), its context, and 16 bytes a Python frame in a vector that may be twice as large as it
is full. The ring gets as many entries as MOST_BYTES hold of them; then the oldest go.
"""

from __future__ import annotations

import pickle
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from tracekit.files import write_by
from tracekit.recorder import private
from tracekit.recorder.guard import in_a_line, say

#: Host memory that the history of a process may take, and what an entry of it weighs: without frames, a frame.
MOST_BYTES = 512 * 2**20
ENTRY_BYTES, FRAME_BYTES = 256, 32
#: Frames of a training program below the loop that calls ``recorder.step``: modules within modules.
BELOW = 40


class History:
    """``begin``: the allocator keeps its events; ``take``: what it kept; ``write``: in a thread; ``finish``: wait until it is written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries = 0
        self._own = False
        self._taken: Any = None
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """A history that runs already, the user's, goes on as it is."""
        self._own = not private.history_is_on()
        if self._own:
            self._entries = entries(depth())
            private.keep_history(self._entries)

    def take(self) -> str:
        """Stop, and take what was kept out of the allocator. A sentence where it is not all."""
        self._taken = private.history()
        self.end()
        kept = (self._taken or {}).get("device_traces") or []
        full = any(len(trace) >= self._entries for trace in kept) if self._entries else False
        return f"the history of the CUDA allocator holds its last {self._entries} events: older ones are lost" if full else ""

    def end(self) -> None:
        """Stop: once, and only what was begun here."""
        if self._own:
            self._own = False
            private.keep_history(0)

    def write(self) -> None:
        """Begin to write what was taken. Whoever ends this process waits for it: threads like this one are joined at the end."""
        if self._taken is None:
            return
        self._thread = threading.Thread(target=self._write, name="tracekit writes a memory snapshot", daemon=False)
        try:
            self._thread.start()
        except RuntimeError:  # no thread begins while the interpreter ends
            self._thread = None
            self._write()

    def finish(self) -> None:
        """Wait until it is written."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _write(self) -> None:
        taken, self._taken = self._taken, None
        try:
            write_by(self._path, lambda name: _dump(taken, name))
        except Exception as error:  # noqa: BLE001 - a thread of the job's process
            say(f"tracekit: {self._path.name} was not written: {in_a_line(error)}")


def _dump(taken: Any, name: str) -> None:
    # The pickler hands over its frames of 64 kB one by one, and the interpreter goes on with the job's threads during each write.
    with Path(name).open("wb") as stream:
        pickle.dump(taken, stream)


def depth() -> int:
    """Python frames of the caller."""
    frame: FrameType | None = sys._getframe(1)
    found = 0
    while frame is not None:
        frame, found = frame.f_back, found + 1
    return found


def entries(frames: int, most: int = MOST_BYTES) -> int:
    """Entries that ``most`` bytes hold where the loop is called ``frames`` deep."""
    return most // (ENTRY_BYTES + FRAME_BYTES * (frames + BELOW))
