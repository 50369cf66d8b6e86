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

from tracekit.job.activity import Window
from tracekit.job.packed import WindowUnpickler
from tracekit.readers.cache_folder import distrust, read_entry, write_entry
from tracekit.readers.sources import Source
from tracekit.readers.state import of_code, of_source

_ENDING = ".window"
_MAGIC = b"TRKWIND1"


def load(source: Source, settings: Iterable[object], directory: str | Path) -> Window | None:
    """The window of a source as it was stored under these settings; None where there is no good entry."""
    path = _entry(source, settings, directory)
    if path is None or distrust(directory):
        return None
    body = read_entry(path, _MAGIC)
    if body is None:
        return None
    try:
        window = WindowUnpickler(io.BytesIO(body)).load()
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
