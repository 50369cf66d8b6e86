"""What an entry of the cache depends on: a file and the manifest beside it, and tracekit's own code."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterator

import tracekit
from tracekit.readers import remote
from tracekit.readers.manifest import beside
from tracekit.readers.sources import Source


def of_source(source: Source) -> list[object] | None:
    """Changes with the file and with its manifest; None for a file whose changes, or whose manifest's, would not be noticed."""
    if source.mtime == 0 or remote.is_url(source.url):
        return None
    manifest = beside(source)
    return [source.url, source.name, source.size, source.mtime, None if manifest is None else of_file(manifest.url)]


def of_file(path: str) -> list[int] | None:
    """Size, and time of the last change of its bytes; None for what is no file."""
    try:
        status = os.stat(path)  # noqa: PTH116 - a name that is no path is no error here
    except (OSError, ValueError):
        return None
    return [status.st_size, status.st_mtime_ns]


@functools.cache
def of_code() -> str:
    """Changes with any file of tracekit: an entry of other code is of no use."""
    files = sorted(_sources(os.path.dirname(tracekit.__file__)))  # noqa: PTH120 - hundreds of files at every start
    return hashlib.sha256(json.dumps([tracekit.__version__, files]).encode()).hexdigest()


def _sources(folder: str) -> Iterator[tuple[str, int, int]]:
    """(path, size, mtime) of what results depend on; as the listing of a folder gives it, without a path object a file."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith((".py", ".html", ".js", ".css")):
                status = entry.stat()
                yield entry.path, status.st_size, status.st_mtime_ns
            elif entry.name != "__pycache__" and entry.is_dir():
                yield from _sources(entry.path)
