"""Which steps are recorded, agreed by all ranks through the recording's folder. No torch in here.

The first steps are given by TRACEKIT_STEPS. Later ones are asked for by a file ``record`` in the folder (SIGUSR2 leaves one): the rank that
manages to take it away decides at which step all begin, far enough ahead for the others to read of it, and writes that into
``.tracekit-recording.json``. Nothing is sent between ranks for it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tracekit.errors import UsageError
from tracekit.files import write_atomically

#: A rank looks at the folder this often, and a decision is so far ahead that every rank has looked (network folders show files late).
LOOK_S, AHEAD_S = 0.5, 10.0
#: Steps of a recording that was asked for while the job runs, and the first step that can be recorded: nothing tells when step 0 begins.
ON_DEMAND, EARLIEST = 3, 1
#: Steps that the profiler warms up where there is time for them.
WARMUP = 1


@dataclass(frozen=True)
class Steps:
    """Steps ``first`` to ``stop - 1`` into a folder."""

    first: int
    stop: int
    folder: Path


def parse_steps(text: str) -> tuple[int, int] | None:
    """``10:13`` as (10, 13): steps 10, 11, 12; None for ``none``. Raises UsageError."""
    if text == "none":
        return None
    first, colon, stop = text.partition(":")
    if not (colon and first.isdecimal() and stop.isdecimal() and int(first) < int(stop) <= 10**9):
        raise UsageError(f"--steps {text!r} is not FIRST:STOP", "10:13 records the steps 10, 11 and 12")
    if int(first) < EARLIEST:
        raise UsageError(f"--steps {text}: step 0 cannot be recorded", "only its end tells what a step of the program is: 1 is the first")
    if int(stop) - int(first) > 1000:
        raise UsageError(f"--steps {text}: that is {int(stop) - int(first)} steps", "a few show what all do: at most 1000")
    return int(first), int(stop)


class Requests:
    """What one rank still has to record. ``news`` is what the user has to know of it, until it is told."""

    def __init__(self, folder: Path, steps: tuple[int, int] | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder = folder
        self.next = Steps(*steps, folder) if steps is not None else None
        self.news = ""
        self._clock = clock
        self._begun = False
        self._looked = clock()
        self._paced: tuple[float, int] | None = None  # time and step from which the duration of a step is told
        self._decided = self._decision_time()

    def due(self, step: int) -> Steps | None:
        """The recording that begins now that ``step`` steps are over, with a warm-up where there is time; None where none does."""
        self._look(step)
        if self.next is not None and not self._begun and self.next.folder == self.folder and step > self.next.first:
            self._postpone(self.next, step)
        self._begun = True
        if self.next is None or step < self.next.first - WARMUP:
            return None
        steps, self.next = self.next, None
        if step > steps.first:
            self.news = f"steps {steps.first} to {steps.stop - 1} are not recorded: this rank was at step {step} when it learned of them"
            return None
        return steps

    def _postpone(self, steps: Steps, step: int) -> None:
        """With several optimizers nothing told what a step is before ``step`` of them were over."""
        self.next = Steps(step, steps.stop + step - steps.first, steps.folder)
        self.news = f"which of the optimizers ends a step shows only now: steps {step} to {self.next.stop - 1} are recorded instead"

    def _look(self, step: int) -> None:
        now = self._clock()
        since, at = self._paced = self._paced or (now, step)
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        if self.next is None and self._taken():
            each = (now - since) / max(1, step - at)
            self._decide(step + WARMUP + max(2, math.ceil(AHEAD_S / max(each, 1e-6))))
        changed = self._decision_time()
        if changed != self._decided:
            self._decided = changed
            self.next = self._read() or self.next
        if now - since > 60 and step > at:
            self._paced = now, step

    def _taken(self) -> bool:
        """Whether there was a request, and this rank is the one that got it."""
        request = self.folder / "record"
        if not request.exists():
            return False
        with contextlib.suppress(OSError):
            request.rename(self.folder / f".record-{os.getpid()}")
            (self.folder / f".record-{os.getpid()}").unlink(missing_ok=True)
            return True
        return False

    def _decide(self, first: int) -> None:
        write_atomically(self._decision, [json.dumps({"first": first, "stop": first + ON_DEMAND}).encode()])

    def _read(self) -> Steps | None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            told = json.loads(self._decision.read_text())
            first, stop = int(told["first"]), int(told["stop"])
            return Steps(first, stop, self.folder / f"steps_{first}_{stop - 1}")
        return None

    @property
    def _decision(self) -> Path:
        return self.folder / ".tracekit-recording.json"

    def _decision_time(self) -> int:
        try:
            return self._decision.stat().st_mtime_ns
        except OSError:
            return 0
