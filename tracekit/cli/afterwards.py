"""What ``tracekit run`` says when its command is over and has left no recording.

The command takes this process's place, so that signals and exit codes are its own; a process of no kin to it looks on until it has ended.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tracekit.recorder import marks

#: Signals that end a whole job, this process with it, before it has said anything.
_LIVED_THROUGH = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGPIPE")
_LOOK_S = 0.2


def look_on(folder: Path, word: str, words: Sequence[str], steps: str) -> int | None:
    """Begin to look on. Returns a descriptor that is closed when the command takes this process's place; a byte in it calls all off.

    None where this system cannot.
    """
    if not hasattr(os, "fork"):
        return None
    command, (reading, writing) = os.getpid(), os.pipe()
    try:
        child = os.fork()
    except OSError:  # no process is to be had: the command matters, not this
        os.close(reading)
        os.close(writing)
        return None
    if child:
        os.close(reading)
        os.waitpid(child, 0)
        return writing
    with contextlib.suppress(BaseException):
        os.close(writing)
        if os.fork() == 0:  # the command waits for children of its own only
            _look_on(command, reading, folder, word, words, steps)
    os._exit(0)


def _look_on(command: int, reading: int, folder: Path, word: str, words: Sequence[str], steps: str) -> None:
    os.setsid()
    for name in _LIVED_THROUGH:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):  # what the command's readers wait for the end of
        os.dup2(nothing, stream)
    ended = _waiting_for(command)
    if os.read(reading, 1) == b"":
        ended()
        sentence = reason(folder, marks.taken(folder, word), words, steps)
        if sentence:
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"tracekit: {sentence}\n".encode())


def _waiting_for(process: int) -> Callable[[], object]:
    """A function that returns when a process has ended; made while it is there, so that its number is not another one's."""
    try:
        descriptor = os.pidfd_open(process)
    except (AttributeError, OSError):

        def poll() -> None:
            with contextlib.suppress(OSError):
                while True:
                    os.kill(process, 0)
                    time.sleep(_LOOK_S)

        return poll
    return lambda: select.select([descriptor], [], [])


def reason(folder: Path, left: set[str], words: Sequence[str], steps: str) -> str:
    """Why there is no recording, and what to do; '' where there is one, or somebody has said it, or none was asked for."""
    if "told" in left or any(next(folder.glob(pattern), None) for pattern in ("rank_*.manifest.json", "steps_*/rank_*.manifest.json")):
        return ""
    asked = steps != "none" or (folder / "record").exists()
    if "begun" not in left:
        return f"recorded nothing: the start-up hook on PYTHONPATH came into no Python of this command; {remedy(words)}"
    if not asked:
        return ""
    if "stepped" not in left:
        return f"recorded nothing: no optimizer has stepped in a Python that the start-up hook came into; {remedy(words)}"
    return "recorded nothing: optimizers have stepped, but no process could write at its end (os._exit, SIGKILL); ask for earlier --steps"


def remedy(words: Sequence[str]) -> str:
    """What keeps the hook out of a command, named where it shows, and what to do."""
    cause = marks.without_hook(list(words))
    if cause.startswith(("python", "pypy")):
        return f"{cause} leaves it out: start without {cause.split()[1]}, or put tracekit.record into the program"
    if cause:
        return f"{cause} leaves it out: write it in front of tracekit run, or put tracekit.record into the program"
    within = "put tracekit run in front of each rank's python, or tracekit.record into the program"
    return f"python -I, -E and -S, env -i, sudo, ssh and containers leave it out: {within}"
