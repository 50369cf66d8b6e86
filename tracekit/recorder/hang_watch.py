"""A job that hangs, or fails, leaves what it was doing: flight recorder dumps and all Python stacks of every rank.

    record(..., flight_recorder=True)

They are written into the recording's folder (``rank_00003.flight_recorder.pickle``, ``rank_00003.stacks.txt``) when

- an exception leaves the loop,
- a collective or message is not over after ``flight_recorder`` seconds,
- SIGTERM or SIGHUP comes, as launchers send it when another rank has failed: also where the main thread is blocked in C,
- another rank has written its own: whoever is first leaves ``.tracekit-hang``, and all ranks look for it.

The job goes on, or ends, as it would have. Where it goes on and ends well, what was written is taken away again: it was only slow.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tracekit.files import write_atomically, write_by
from tracekit.recorder import private
from tracekit.recorder.guard import Guard, quietly, say
from tracekit.recorder.ring import Ring, whole_dump

#: Seconds after which a call counts as hanging where a user says only True: half of NCCL's own timeout, which ends the process.
SECONDS = 300.0
#: How often a rank looks [s], and how long its main thread has to answer a signal before the process ends without it.
LOOK_S, ANSWER_S = 2.0, 5.0
SIGNALS = (signal.SIGTERM, signal.SIGHUP)
MARK = ".tracekit-hang"
_HERE = str(Path(__file__).parent)
#: Calls that torch's recorder keeps where a process group is made after this; a job's own setting stays.
RING = "2000"


#: The process that watches its signals, the end of the pipe that they come through, and which.
_watching: list[tuple[int, int, list[signal.Signals]]] = []


#: The mask of signals of the thread that forks just now.
_masked: list[set[signal.Signals | int]] = []


def _before_fork() -> None:
    """A child (a worker of a data loader) must not have the pipe, not even for a moment: a signal to it is none to the job.

    Signals wait until the child has its handlers: one that comes in between would be lost.
    """
    if _watching:
        with contextlib.suppress(ValueError, OSError):
            _masked[:] = [signal.pthread_sigmask(signal.SIG_BLOCK, _watching[0][2])]
            signal.set_wakeup_fd(-1)


def _in_parent() -> None:
    if _watching:
        with contextlib.suppress(ValueError, OSError):
            signal.set_wakeup_fd(_watching[0][1], warn_on_full_buffer=False)
    _unmask()


def _in_child() -> None:
    if _watching:
        with contextlib.suppress(ValueError, OSError):
            signal.set_wakeup_fd(-1)
            for number in _watching[0][2]:
                signal.signal(number, signal.SIG_DFL)
        _watching.clear()
    _unmask()


def _unmask() -> None:
    if _masked:
        signal.pthread_sigmask(signal.SIG_SETMASK, _masked.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)


class HangWatch:
    """Watches from ``start`` to ``stop``. ``ended_by`` is called with a signal's name in the main thread, after the dump."""

    def __init__(self, folder: Path, seconds: float, rank: Callable[[], int], ended_by: Callable[[str], None]) -> None:
        self._folder, self._seconds, self._rank, self._ended_by = folder, seconds, rank, ended_by
        self._guard = Guard()
        self._ring = Ring(self._guard)
        self._undo: list[Callable[[], Any]] = []
        self._lock = threading.RLock()  # a signal's handler may come into the main thread's own dump
        self._over = threading.Event()
        self._answered = threading.Event()
        self._written: list[Path] = []
        self._told: set[Any] = set()
        self._read = self._write = -1
        self._marked = self._mark_time()
        self._own_mark = False
        self._newest = -1

    # From outside ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Put everything in place. Never raises."""
        self._guard.safely(self._start)

    def raised(self, error: BaseException) -> None:
        """An exception leaves the loop: keep what there is."""
        if not isinstance(error, (SystemExit, GeneratorExit)):
            inside = error.__traceback__
            while inside is not None and inside.tb_frame.f_code.co_filename.startswith(_HERE):
                inside = inside.tb_next
            text = "".join(traceback.format_exception(type(error), error, inside))
            self._guard.safely(lambda: self._dump(text))

    def stop(self, *, well: bool) -> None:
        """Take everything away. ``well``: the loop ended as it should, so that what was written by then says nothing."""
        if self._guard.foreign:
            return
        self._over.set()
        while self._undo:
            self._guard.safely(self._undo.pop(), always=True)
        if well:
            with self._lock, contextlib.suppress(OSError):
                while self._written:
                    self._written.pop().unlink(missing_ok=True)
                if self._own_mark:
                    (self._folder / MARK).unlink(missing_ok=True)

    # What is put in place ------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        name = private.flight_recorder_setting()
        if name not in os.environ:
            os.environ[name] = RING
            self._undo.append(lambda: os.environ.pop(name, None))
        self._folder.mkdir(parents=True, exist_ok=True)
        self._undo += self._ring.follow()
        if threading.current_thread() is threading.main_thread():
            self._catch_signals()
        threading.Thread(target=self._look, daemon=True, name="tracekit-hang").start()

    def _catch_signals(self) -> None:
        """Handlers, where the job left the default; their bytes come through a pipe even while the main thread is in C."""
        ours = [number for number in SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
        if not ours:
            return
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if before != -1:  # an event loop's
            signal.set_wakeup_fd(before)
            os.close(self._read)
            os.close(self._write)
            self._read = self._write = -1
            return
        for number in ours:
            signal.signal(number, self._handle)
        _watching[:] = [(os.getpid(), self._write, ours)]
        self._undo.append(lambda: self._leave_signals(ours))

    def _leave_signals(self, ours: list[signal.Signals]) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in ours:
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL)
        _watching.clear()
        kept = signal.set_wakeup_fd(-1)
        if kept not in (self._write, -1):
            signal.set_wakeup_fd(kept)
        os.close(self._write)

    def _handle(self, number: int, frame: Any) -> None:  # noqa: ARG002
        """In the main thread, when it is back in Python."""
        if not self._guard.foreign:
            self._answered.set()
            self._guard.safely(self._dump)
            self._guard.safely(lambda: self._ended_by(signal.Signals(number).name), always=True)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    # The watching thread -------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        every = max(0.05, min(LOOK_S, self._seconds / 4))
        while not self._over.is_set():
            if self._read >= 0:
                ready, _, _ = select.select([self._read], [], [], every)
                if ready and (numbers := os.read(self._read, 64)):
                    self._signalled(numbers)
                elif ready:
                    break
            else:
                self._over.wait(every)
            if not self._over.is_set():
                self._guard.safely(self._check)
        if self._read >= 0:
            os.close(self._read)

    def _signalled(self, numbers: bytes) -> None:
        """A signal has come: dump now, and end the process where its main thread cannot."""
        number = next((number for number in numbers if number in SIGNALS), None)
        if number is None:
            return
        self._guard.safely(self._dump)
        if not self._answered.wait(ANSWER_S) and not self._over.is_set():
            private.default_signal(number)
            os.kill(os.getpid(), number)

    def _check(self) -> None:
        now = time.time_ns()
        late = {call for call in private.open_calls() if call[-1] and now - call[-1] > self._seconds * 1e9}
        late |= {
            (entry["profiling_name"], entry["p2p_seq_id"], entry["time_created_ns"])
            for entry in self._ring.entries()
            if not entry["retired"] and now - entry["time_created_ns"] > self._seconds * 1e9
        }
        marked = self._mark_time()
        new, self._told = late - self._told, self._told | late
        if new or marked != self._marked:
            self._marked = marked
            self._dump(anew=bool(new))

    # What is written -----------------------------------------------------------------------------------------------------

    def _dump(self, error: str = "", *, anew: bool = False) -> None:
        """Without ``anew`` what was written since this rank made its last call is kept: calls end as well when other ranks do."""
        with self._lock, quietly():
            stem = self._folder / f"rank_{self._rank():05d}"
            stacks, calls = Path(f"{stem}.stacks.txt"), Path(f"{stem}.flight_recorder.pickle")
            data, newest = whole_dump(self._rank(), self._ring.entries())
            fresh = not anew and newest == self._newest
            if error or not fresh:
                write_by(stacks, lambda path: _write_stacks(path, error))
            if not fresh:
                write_atomically(calls, [data])
            first, self._newest = not self._written, newest
            self._written += [path for path in (stacks, calls) if path not in self._written]
            if not fresh and self._mark_time() == self._marked:
                (self._folder / MARK).write_text("a rank hangs or has failed: all ranks dump\n")
                self._marked, self._own_mark = self._mark_time(), True
        if first:
            say(f"tracekit wrote what this rank was doing: {calls}")

    def _mark_time(self) -> int:
        try:
            return (self._folder / MARK).stat().st_mtime_ns
        except OSError:
            return 0


def _write_stacks(path: str, error: str) -> None:
    with Path(path).open("w", encoding="utf-8", errors="replace") as file:
        file.write(error)
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)


def seconds_of(given: Any) -> float:
    """Of ``record``'s argument ``flight_recorder``; 0 where nothing is to be watched. Raises ValueError."""
    if given is True or given is False or given is None:
        return SECONDS if given else 0.0
    seconds = float(given)
    if not 0 < seconds < float("inf"):
        raise ValueError(f"flight_recorder={given!r} is no number of seconds")
    return seconds
