"""A job that is told to end by SIGTERM or SIGHUP, as launchers do when another rank has failed, keeps what was recorded.

Only where the job left the default in place, and only for the window: a handler of the job's own comes first, always.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def ending(keep: Callable[[str], None]) -> Iterator[None]:
    """While open, such a signal calls ``keep`` with its name, and then ends the process as it would have done."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python lets only the main thread set handlers
        return
    process = os.getpid()

    def handler(number: int, frame: Any) -> None:  # noqa: ARG001
        if os.getpid() == process:  # a forked child has nothing to keep
            keep(signal.Signals(number).name)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    ours = [number for number in SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in ours:
            if os.getpid() == process and signal.getsignal(number) is handler:
                signal.signal(number, signal.SIG_DFL)
