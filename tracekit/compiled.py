"""Options for compiled functions: without the GIL, and kept on disk where that is possible."""

from __future__ import annotations

from typing import Any

from numba import njit


def _nothing() -> None:
    """A function to try the cache on."""


def _can_be_kept() -> bool:
    """Whether numba finds a folder to keep compiled code in: beside the source, or the user's cache; it refuses with RuntimeError."""
    try:
        njit(cache=True)(_nothing)
    except RuntimeError:
        return False
    return True


#: False: every process compiles anew (seconds). NUMBA_CACHE_DIR names a folder that can be written.
KEPT = _can_be_kept()
COMPILED: dict[str, Any] = {"nogil": True, "cache": KEPT, "boundscheck": False, "error_model": "numpy"}
