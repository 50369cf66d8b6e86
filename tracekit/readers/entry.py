"""The compiled functions that Python calls, and the machine code of them kept on disk.

numba keeps machine code beside the source, in ``__pycache__``, or else in the user's cache folder. It recompiles when the file of the
function itself changed, but not for the files of what it calls or takes constants from (the categories' spellings are counted in
trace/events.py): so a digest of all these sources is part of what is compiled here.
Where no folder can be written to, everything is compiled again in every process, and ``Compiled.problem`` says so.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from tracekit import compiled, units
from tracekit.compiled import Native, jit, kept
from tracekit.readers import keys, lex, numbers, pool, scan
from tracekit.readers.lex import COMPILED
from tracekit.trace import events

_SLOW_START = "the compiled reader cannot be kept on disk, so every run compiles it anew: set NUMBA_CACHE_DIR to a writable folder"


class Compiled(NamedTuple):
    """Entry points. Texts, pools and control blocks are addresses. ``problem``: a sentence when nothing could be kept on disk, else ''."""

    scan_events: Callable[[int, int, int, int], tuple[int, int]]
    find_events: Callable[[int, int, int], int]
    intern: Callable[[int, int, int, int, int], int]
    rehash: Callable[[int], None]
    rehash_lanes: Callable[[int], None]
    problem: str = ""


@functools.cache
def entries() -> Compiled:
    """The entry points, out of the cache or compiled now (some seconds)."""
    digest = _digest()
    try:
        if kept():
            return _entries(digest, cache=True)
    except (OSError, EOFError, pickle.UnpicklingError):  # a full disk, a damaged cache
        pass
    return _entries(digest, cache=False)._replace(problem=_SLOW_START)


def _digest() -> int:
    return sources_digest(lex, numbers, pool, keys, scan, compiled, events, units)


def sources_digest(*modules: ModuleType) -> int:
    """Of the sources of these modules; 0 where they are not at hand (then numba has no file to keep its code by either)."""
    digest = hashlib.sha256()
    for module in modules:
        try:
            digest.update(Path(str(module.__file__)).read_bytes())
        except OSError:
            return 0
    return int.from_bytes(digest.digest()[:7], "little")


def _entries(digest: int, cache: bool) -> Compiled:
    """Functions of their own, so that they enclose the digest: numba compares what a function encloses before it takes its cached code."""
    n = "int64"
    options = {**COMPILED, "cache": cache}

    @jit(f"UniTuple({n}, 2)({n}, {n}, {n}, {n})", **options)
    def scan_events(text: Native, position: Native, end: Native, control: Native) -> Native:
        return (digest, digest) if end < 0 else scan.scan_events(text, position, end, control)

    @jit(f"{n}({n}, {n}, {n})", **options)
    def find_events(text: Native, start: Native, end: Native) -> Native:
        return digest if end < 0 else scan.find_events(text, start, end)

    @jit(f"{n}({n}, {n}, {n}, {n}, {n})", **options)
    def intern(text: Native, start: Native, length: Native, kind: Native, block: Native) -> Native:
        return digest if length < 0 else pool.intern(text, start, length, kind, block)

    @jit(f"{n}({n})", **options)
    def rehash(block: Native) -> Native:
        pool.rehash(block)
        return digest

    @jit(f"{n}({n})", **options)
    def rehash_lanes(control: Native) -> Native:
        scan.rehash_lanes(control)
        return digest

    return Compiled(scan_events, find_events, intern, rehash, rehash_lanes)
