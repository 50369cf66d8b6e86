"""The profiler of the window, and other profilers on the same loop.

Kineto knows one profiler a process: a second one makes the first lose its state, and torch crashes where it is stopped. So ours does not
begin where another one is prepared or running, and ends itself, with what it has, before another one begins.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity

from tracekit.recorder import private
from tracekit.recorder.forks import children_end
from tracekit.recorder.found import instances
from tracekit.recorder.guard import quietly
from tracekit.recorder.write import write_trace


class Profiling:
    """One window of torch's profiler: ``prepare`` (it warms up), ``begin``, ``end``, ``write``. Times are Unix ns."""

    def __init__(self, give_way: Callable[[str], None], options: dict[str, bool]) -> None:
        """``give_way`` is called, with a sentence, just before another profiler begins; it has to end this one."""
        self._options = options
        self._give_way = give_way
        self._profiler: Any = None
        self._own = False  # in our own call of torch's profiler
        self._step: Any = None
        self._undo: list[private.Undo] = []
        self.running = False
        self.start_ns = self.end_ns = 0

    def prepare(self) -> None:
        """Warm up: events are collected and thrown away. Raises RuntimeError where torch cannot."""
        children_end()
        profiler = private.kineto_profile(activities=activities(), **self._options)
        with quietly():
            self._ours(profiler.prepare_trace)
        self._profiler = profiler
        kind = torch.autograd.profiler.profile
        self._undo = [private.replaced(kind, name, self._before_others) for name in ("_prepare_trace", "_start_trace")]

    def begin(self) -> None:
        """Events are kept from now on."""
        with quietly():
            self._ours(self._profiler.start_trace)
        self.running = True
        self.start_ns = time.time_ns()

    def open_step(self, number: int) -> None:
        """The range ``ProfilerStep#number``, until ``close_step``."""
        if self.running:
            self._step = record_function(f"ProfilerStep#{number}")
            self._step.__enter__()

    def close_step(self) -> None:
        """The step is over."""
        opened, self._step = self._step, None
        if opened is not None:
            opened.__exit__(None, None, None)

    def end(self) -> bool:
        """Stop; whether there are events to write. Nothing where it is not prepared."""
        undo, self._undo = self._undo, []
        for step in undo:
            step()
        profiler, running = self._profiler, self.running
        if profiler is None or self.end_ns:
            return False
        self.running, self.end_ns = False, time.time_ns()
        with quietly():
            self.close_step()
            if not running:
                self._ours(profiler.start_trace)  # a prepared profiler can be stopped only once it runs
            self._ours(profiler.stop_trace)
        return running

    def write(self, path: Path) -> None:
        """The trace of the window. Raises OSError, RuntimeError."""
        with quietly():
            write_trace(self._profiler, path)

    def _ours(self, call: Callable[[], Any]) -> None:
        self._own = True
        try:
            call()
        finally:
            self._own = False

    def _before_others(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(profiler: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._own:
                self._give_way("another profiler began; it goes on, this recording has ended")
            return original(profiler, *args, **kwargs)

        return call


def activities() -> list[ProfilerActivity]:
    """The CPU, and the accelerators that torch can profile here."""
    return sorted(torch.profiler.supported_activities(), key=str)


def other_profiler() -> str:
    """What other profiler is at work in this process, as a sentence; '' where there is none."""
    kind = torch.autograd.profiler.profile
    # A profiler that warms up is prepared but not enabled: torch has no list of them.
    waiting = any(profiler.entered and profiler.kineto_results is None for profiler in instances(kind))
    if waiting or torch.autograd._profiler_enabled():
        return "another profiler is at work on this loop, and torch has one a process: it goes on, nothing is recorded"
    return ""
