"""What all analyses keep of one file, kept for the next time: a second look at the same traces reads no events at all.

An entry is a pickled Window behind its SHA-256. It is believed only in a folder that nobody else can write (``cache_folder.distrust``), and
its unpickler knows the classes of a Window and refuses any other name. An entry is good for one file and its manifest (path, size, time of
last change), one choice of steps, one set of analyses, and one state of tracekit's own code.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tracekit.job.activity import Window
from tracekit.readers.cache_folder import distrust, read_entry, write_entry
from tracekit.readers.sources import Source
from tracekit.readers.state import of_code, of_source

_ENDING = ".window"
_MAGIC = b"TRKWIND1"
#: What arrays, tables and text columns are rebuilt by; nothing of it opens, imports or runs anything.
_ALLOWED = {
    ("builtins", "slice"),
    ("builtins", "set"),
    ("builtins", "frozenset"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy._core.numeric", "_frombuffer"),
    ("pandas", "Categorical"),
    ("pandas", "CategoricalDtype"),
    ("pandas", "DataFrame"),
    ("pandas", "Index"),
    ("pandas", "RangeIndex"),
    ("pandas", "StringDtype"),
    ("pandas._libs.arrays", "__pyx_unpickle_NDArrayBacked"),
    ("pandas._libs.internals", "_unpickle_block"),
    ("pandas.arrays", "ArrowStringArray"),
    ("pandas.core.indexes.base", "_new_Index"),
    ("pandas.core.internals.managers", "BlockManager"),
    ("pyarrow.lib", "_restore_array"),
    ("pyarrow.lib", "py_buffer"),
    ("pyarrow.lib", "type_for_alias"),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """The classes of a Window; UnpicklingError for any other name."""
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        found = super().find_class(module, name) if module.startswith("tracekit.") else None
        if not isinstance(found, type) or found.__module__ != module or issubclass(found, BaseException):
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a window")
        return found


def load(source: Source, settings: Iterable[object], directory: str | Path) -> Window | None:
    """The window of a source as it was stored under these settings; None where there is no good entry."""
    path = _entry(source, settings, directory)
    if path is None or distrust(directory):
        return None
    body = read_entry(path, _MAGIC)
    if body is None:
        return None
    try:
        window = _Unpickler(io.BytesIO(body)).load()
    except (
        pickle.UnpicklingError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        ImportError,
        EOFError,
        IndexError,
        MemoryError,
    ):
        return None
    return window if isinstance(window, Window) else None


def store(source: Source, settings: Iterable[object], window: Window, directory: str | Path) -> None:
    """Keep a window for the next time, where that is possible."""
    path = _entry(source, settings, directory)
    if path is None or distrust(directory):
        return
    write_entry(path, _MAGIC, pickle.dumps(window, protocol=5))


def _entry(source: Source, settings: Iterable[object], directory: str | Path) -> Path | None:
    """None for a file whose changes, or whose manifest's, would not be noticed."""
    state = of_source(source)
    if state is None:
        return None
    return Path(directory) / (hashlib.sha256(json.dumps([*state, of_code(), *settings], default=str).encode()).hexdigest()[:40] + _ENDING)
