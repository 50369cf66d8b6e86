"""Compiled functions: one typed way to declare them, without the GIL, and kept on disk where that is possible.

numba is imported when the first function is compiled: importing it and taking one kept function from disk costs what a small job does.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar, cast

import numpy as np

#: A number of compiled code, an address among them: numba finds its width from how the function is called.
Native = Any
_Function = TypeVar("_Function", bound=Callable[..., Any])
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

OPTIONS: dict[str, Any] = {"nogil": True, "boundscheck": False, "error_model": "numpy"}

#: So many elements are gone through by the interpreter before compiled code pays: numba's start takes as long (about 0.3 s of CPU).
INTERPRETED_ELEMENTS = 100_000


def jit(*signature: str, **options: Any) -> Callable[[_Function], _Function]:
    """``numba.njit`` that keeps the type of what it compiles: called from Python or from compiled code, it is the function it was."""
    import numba

    njit: Any = numba.njit  # its own types know no function that takes addresses
    decorate: Callable[[_Function], _Function] = njit(*signature, **options)
    return decorate


def _nothing() -> None:
    """A function to try the cache on."""


@functools.cache
def kept() -> bool:
    """Whether numba finds a folder to keep compiled code in: beside the source, or the user's cache; it refuses with RuntimeError.

    False: every process compiles anew (seconds). NUMBA_CACHE_DIR names a folder that can be written.
    """
    try:
        jit(cache=True)(_nothing)
    except RuntimeError:
        return False
    return True


class Late(Generic[_Arguments, _Result]):
    """A function over arrays that Python calls, compiled when that pays: small jobs never import numba.

    The first calls are interpreted, until all functions of this kind have gone through INTERPRETED_ELEMENTS (the longest argument of each
    call counts). Integers wrap around in both.
    """

    spent = 0

    def __init__(self, function: Callable[_Arguments, _Result]) -> None:
        """``function`` must mean the same to numba and to the interpreter."""
        self.interpreted = function
        functools.update_wrapper(self, function)

    @functools.cached_property
    def compiled(self) -> Callable[_Arguments, _Result]:
        """The function as machine code, from disk or compiled now."""
        return jit(cache=kept(), **OPTIONS)(self.interpreted)

    def __call__(self, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        """What the function gives."""
        if "numba" not in sys.modules:
            Late.spent += max((len(part) for part in args if isinstance(part, np.ndarray)), default=0)
            if Late.spent <= INTERPRETED_ELEMENTS:
                with np.errstate(all="ignore"):
                    return self.interpreted(*args, **kwargs)
        return self.compiled(*args, **kwargs)


def late(function: _Function) -> _Function:
    """The function as a Late one, with the type that it had."""
    return cast(_Function, Late(function))
