"""Trace files behind an fsspec URL: ``s3://``, ``gs://``, ``memory://`` and whatever else fsspec knows. fsspec is imported only here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any, BinaryIO, cast

_URL = re.compile(r"^[A-Za-z][A-Za-z0-9+.\-]*(?:::[^/]*)?://")
_MAGIC = re.compile(r"[*?\[]")


def is_url(path: str) -> bool:
    """Whether a path names a scheme."""
    return _URL.match(path) is not None


def open_url(url: str) -> BinaryIO:
    """The raw bytes behind a URL."""
    system, path = _file_system(url)
    return cast(BinaryIO, system.open(path, "rb"))


def entries(url: str) -> Iterator[tuple[str, str, int, int, bool]]:
    """(url, name to show, size [bytes], mtime [ns, 0 unknown], whether ``url`` is this very file) of every file that ``url`` leads to.

    Raises FileNotFoundError where there is none, ImportError where a package is missing, and what the file system raises.
    """
    system, path = _file_system(url)
    if _MAGIC.search(path) and not system.exists(path):
        matches = system.glob(path, detail=True)
        if not matches:
            raise FileNotFoundError(path)
        for name, info in matches.items():
            yield from _below(system, name, info)
        return
    info = system.info(path)
    if info.get("type") == "directory":
        yield from _below(system, path, info)
    else:
        one = url if "::" in url else str(system.unstrip_protocol(path))
        yield one, PurePosixPath(path).name, _size(info), _modified(info), True


def _file_system(url: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    system, path = url_to_fs(url)
    return system, str(path)


def _below(system: Any, path: str, info: dict[str, Any]) -> Iterator[tuple[str, str, int, int, bool]]:
    """A file itself, or every file in a folder that is not hidden."""
    if info.get("type") != "directory":
        yield system.unstrip_protocol(path), PurePosixPath(path).name, _size(info), _modified(info), False
        return
    root = PurePosixPath(str(system._strip_protocol(path)))
    for name, found in system.find(path, detail=True).items():
        file = PurePosixPath(name)
        relative = file.relative_to(root) if file.is_relative_to(root) else file
        if not any(part.startswith(".") for part in relative.parts):
            yield system.unstrip_protocol(name), str(relative), _size(found), _modified(found), False


def _size(info: dict[str, Any]) -> int:
    size = info.get("size")
    return int(size) if isinstance(size, int | float) else 0


def _modified(info: dict[str, Any]) -> int:
    for key in ("mtime", "LastModified", "last_modified", "updated", "created"):
        value: Any = info.get(key)
        if hasattr(value, "timestamp"):
            value = value.timestamp()
        if isinstance(value, int | float):
            return int(value * 1_000_000_000)
    return 0
