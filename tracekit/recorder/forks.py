"""A forked child of a process in which torch's profiler has run ends, as it would have done without.

The profiler's library keeps a thread that waits on a condition (libkineto's ConfigLoader). ``exit`` destroys the condition, and in a child
of ``fork`` waits for that thread for ever: it is not there, and its wait still counts. Python is over by then. So such a child flushes what
C holds back, and ends by ``_exit`` with its own status.
"""

from __future__ import annotations

import ctypes
import functools
import os


@functools.cache
def children_end() -> None:
    """See to it, once a process; nothing where the C library has no ``on_exit``."""
    library = ctypes.CDLL(None)
    if not all(hasattr(library, name) for name in ("on_exit", "fcloseall", "_exit")):
        return

    def after() -> None:
        # What was registered last is called first. Compiled functions only: the interpreter is gone when they are called.
        library.on_exit(library._exit, None)
        library.on_exit(library.fcloseall, None)

    os.register_at_fork(after_in_child=after)
