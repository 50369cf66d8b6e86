"""The folder of the cache: where it is, whose it is, what it holds, and how it is kept below its limit."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tracekit.files import SCRATCH_PREFIX, open_regular, write_atomically

LIMIT_BYTES = 10_000_000_000
#: What entries end in: tables of one file, what all analyses keep of one file, and the whole answer to one question.
ENDINGS = (".arrow", ".window", ".answer")
SCRATCH = "writing-"

_STEM = 40  # hexadecimal digits of an entry's key
_DIGEST = 32  # bytes of a SHA-256
_MOST_BYTES = 1 << 30  # of an entry
_LEFT_OVER_AFTER_S = 3600


@dataclass(frozen=True)
class Usage:
    """What a cache folder holds."""

    entries: int
    size: int  # [bytes]
    oldest: float | None  # when the entry was used that was not used for longest [s since 1970]; None without entries


def default_directory() -> Path:
    """$TRACEKIT_CACHE, else ``tracekit`` in the user's cache folder ($XDG_CACHE_HOME, ~/.cache)."""
    named = os.environ.get("TRACEKIT_CACHE")
    if named:
        return Path(os.path.expanduser(named))  # noqa: PTH111 - Path("~nobody") raises
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")  # noqa: PTH111, PTH118
    return Path(home) / "tracekit"


def distrust(directory: str | Path) -> str | None:
    """Why a folder is not used: entries are believed, so nobody else may be able to put any there. None: it may be used (or made)."""
    try:
        status = os.stat(directory)  # noqa: PTH116 - an empty Path is the current folder
    except OSError:
        return None
    if not stat.S_ISDIR(status.st_mode):
        return "is no folder"
    if hasattr(os, "getuid") and status.st_uid != os.getuid():
        return "belongs to another user"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "can be written by other users"
    return None


def usage(directory: str | Path) -> Usage:
    """How many entries, how large, since when. Raises OSError; nothing where there is no folder."""
    found = list(_entries(directory))
    return Usage(len(found), sum(size for _, size, _ in found), min((written for written, _, _ in found), default=None))


def clear(directory: str | Path) -> Usage:
    """Remove every entry, and nothing else; what was removed."""
    removed = [entry for entry in _entries(directory) if _remove(entry[2], 1)]
    return Usage(len(removed), sum(size for _, size, _ in removed), min((written for written, _, _ in removed), default=None))


def prune(directory: str | Path, limit_bytes: int = LIMIT_BYTES) -> int:
    """Remove the entries that were not used for longest until at most ``limit_bytes`` are left; returns the bytes removed."""
    removed = 0
    try:
        for path in Path(directory).iterdir():
            if path.name.startswith((SCRATCH, SCRATCH_PREFIX)) and path.suffix == ".tmp":  # left by a killed run
                status = path.lstat()
                removed += _remove(path, status.st_size) if time.time() - status.st_mtime > _LEFT_OVER_AFTER_S else 0
        entries = sorted(_entries(directory))
    except OSError:
        return removed
    left = sum(size for _, size, _ in entries)
    for _, size, path in entries:
        if left <= limit_bytes:
            break
        left -= size
        removed += _remove(path, size)
    return removed


def read_entry(path: Path, magic: bytes) -> bytes | None:
    """What ``write_entry`` wrote; None where there is none, or where it is not whole."""
    try:
        with open_regular(path) as file:
            data = file.read(_MOST_BYTES)
    except (OSError, MemoryError):
        return None
    head = len(magic) + _DIGEST
    body = data[head:]
    if data[: len(magic)] != magic or data[len(magic) : head] != hashlib.sha256(body).digest():
        return None
    used(path)
    return body


def write_entry(path: Path, magic: bytes, body: bytes) -> None:
    """Keep an entry behind its kind and its digest, where that is possible."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(path, [magic, hashlib.sha256(body).digest(), body])


def used(path: str | Path) -> None:
    """Note that an entry was of use now: those that were not for longest go first."""
    with contextlib.suppress(OSError):
        os.utime(path)


def _entries(directory: str | Path) -> Iterator[tuple[float, int, Path]]:
    """(time of the last use, size, path) of each entry."""
    folder = Path(directory)
    if not folder.exists():
        return
    for path in folder.iterdir():
        if path.suffix in ENDINGS and len(path.stem) == _STEM:
            status = path.lstat()
            yield status.st_mtime, status.st_size, path


def _remove(path: Path, size: int) -> int:
    try:
        path.unlink()
    except OSError:
        return 0
    return size
