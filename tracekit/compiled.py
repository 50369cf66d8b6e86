"""Compiled functions: one typed way to declare them, without the GIL, and kept on disk where that is possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit

#: A number of compiled code, an address among them: numba finds its width from how the function is called.
Native = Any
_Function = TypeVar("_Function", bound=Callable[..., Any])
_njit: Any = njit  # its own types know no function that takes addresses


def jit(*signature: str, **options: Any) -> Callable[[_Function], _Function]:
    """``numba.njit`` that keeps the type of what it compiles: called from Python or from compiled code, it is the function it was."""
    decorate: Callable[[_Function], _Function] = _njit(*signature, **options)
    return decorate


def _nothing() -> None:
    """A function to try the cache on."""


def _can_be_kept() -> bool:
    """Whether numba finds a folder to keep compiled code in: beside the source, or the user's cache; it refuses with RuntimeError."""
    try:
        jit(cache=True)(_nothing)
    except RuntimeError:
        return False
    return True


#: False: every process compiles anew (seconds). NUMBA_CACHE_DIR names a folder that can be written.
KEPT = _can_be_kept()
COMPILED: dict[str, Any] = {"nogil": True, "cache": KEPT, "boundscheck": False, "error_model": "numpy"}
