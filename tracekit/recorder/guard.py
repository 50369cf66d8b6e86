"""Never into the training loop: what goes wrong in the recorder is swallowed, said once, and ends the recording, not the job.

The promise has exceptions to make safe, and more: warnings may be turned into errors (``-W error``), and a forked child (a worker of a
data loader) inherits the recorder without being the job's rank.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch


class Guard:
    """Runs the recorder's own code in one process. ``failed`` is what ended the recording, '' while nothing has."""

    def __init__(self) -> None:
        self.failed = ""
        self._process = os.getpid()

    @property
    def foreign(self) -> bool:
        """Whether this is another process than the one that began: a fork."""
        return os.getpid() != self._process

    def safely(self, call: Callable[[], Any], *, always: bool = False) -> None:
        """Call it, unless the recording has failed already (``always``: even then). Never in a forked child."""
        if self.foreign or (self.failed and not always):
            return
        try:
            call()
        except Exception as error:  # noqa: BLE001 - the promise of this file
            self.fail(error)

    def noted(self, call: Callable[[], Any], what: str, notes: list[str]) -> None:
        """Call it; where it fails, recording goes on without it, and a note says so."""
        if self.foreign:
            return
        try:
            call()
        except Exception as error:  # noqa: BLE001 - the promise of this file
            notes.append(f"{what} is not recorded: {in_a_line(error)}")

    def guarded(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """``hook`` that swallows its exceptions and returns nothing."""
        return _Hook(self, hook)

    def fail(self, error: BaseException) -> None:
        """The recording ends because of ``error``."""
        self.give_up(in_a_line(error))

    def give_up(self, why: str) -> None:
        """The recording ends; the first reason is the one that is told."""
        if not self.failed:
            self.failed = why[:500]
            say(f"tracekit stopped recording: {self.failed}")


class _Hook:
    """Calls ``hook`` behind its guard. Code that torch compiles goes without: it would be compiled in, or break the graph.

    A model that is copied or saved within the window takes its hooks along: in copies there is one in place of this that does nothing,
    and loads where there is no tracekit.
    """

    def __init__(self, guard: Guard, hook: Callable[..., Any]) -> None:
        self._guard, self._hook = guard, hook

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        guard = self._guard
        if guard.failed or guard.foreign:
            return
        try:
            self._hook(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - the promise of this file
            guard.fail(error)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")  # takes anything, returns None


def in_a_line(error: BaseException) -> str:
    """Its type and the first line of what it says."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'without a message'}"


def say(sentence: str) -> None:
    """A warning for the user; on standard error where warnings are errors, which would end the job."""
    try:
        warnings.warn(sentence, UserWarning, stacklevel=5)
    except Warning:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # a job may have closed it
            print(sentence, file=sys.stderr, flush=True)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Warnings of torch's own code that the recorder calls are no errors in here, whatever the job made of warnings."""
    if not any(action == "error" for action, *_ in warnings.filters):
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
