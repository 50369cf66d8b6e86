"""Files appear whole or not at all: written to a scratch file of their own in the same folder, then moved into place.

And only what is a file is read: a pipe or device under the name of one would wait, or give, for ever."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

#: How names of scratch files begin: hidden, so that no reader of a folder takes one for a trace.
SCRATCH_PREFIX = ".tracekit-"


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """A file for reading. Raises OSError, also for what is no regular file (nothing waits for a pipe that nobody writes to)."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "is not a regular file", os.fspath(path))
    return os.fdopen(handle, "rb")


def write_atomically(path: str | os.PathLike[str], parts: Iterable[bytes]) -> None:
    """Write a file so that nobody ever sees half of it.

    Raises OSError that names ``path``, and leaves the old file and no litter behind, when that fails. A link keeps pointing to the file
    that it names; a device or pipe is written to directly.
    """
    target = Path(path)
    with naming(target):
        if target.exists() and not target.is_file():
            with target.open("wb") as stream:
                stream.writelines(parts)
            return
        with scratch_beside(target) as scratch, scratch.open("wb") as stream:
            stream.writelines(parts)


def write_by(path: Path, write: Callable[[str], object], suffix: str = "") -> None:
    """The same for a writer that wants a path: ``write(name of a scratch file)``. ``suffix``: how that name has to end."""
    with naming(path), scratch_beside(path, suffix) as scratch:
        write(str(scratch))


@contextlib.contextmanager
def scratch_beside(path: Path, suffix: str = ".tmp") -> Iterator[Path]:
    """A new file that nobody else can have planted (O_EXCL), in the folder of ``path``; moved there when the block ends well."""
    target = path.resolve()
    handle, name = tempfile.mkstemp(suffix, SCRATCH_PREFIX, target.parent)
    os.close(handle)
    scratch = Path(name)
    try:
        yield scratch
        scratch.chmod(_mode_of(target))
        scratch.replace(target)
    finally:
        scratch.unlink(missing_ok=True)


def _mode_of(target: Path) -> int:
    """Permissions of the file that is replaced, else those of any new file (``mkstemp`` gives its own to the owner alone)."""
    try:
        return target.stat().st_mode & 0o777
    except FileNotFoundError:
        return _mode_of_new(target.parent)


def _mode_of_new(folder: Path) -> int:
    """Permissions of a new file in ``folder``. The umask is only looked at: setting it, even for a moment, shows in files that other
    threads of a recorded job make meanwhile. Where the system does not tell it, an empty file made and removed again does."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        status = Path("/proc/self/status").read_bytes()
        return 0o666 & ~int(status.split(b"\nUmask:", 1)[1].split(None, 1)[0], 8)
    probe = folder / f"{SCRATCH_PREFIX}{secrets.token_hex(8)}.tmp"
    handle = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        return os.fstat(handle).st_mode & 0o777
    finally:
        os.close(handle)
        probe.unlink(missing_ok=True)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError inside (a full disk has no name of its own, a scratch file one that means nothing) is raised with the name of ``path``."""
    try:
        yield
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        what = f"{error.strerror or error}"
        if path.is_symlink() and not path.exists():
            what = f"the link points to {str(path.readlink())!r}: {what}"
        raise type(error)(error.errno, what, str(path)) from error
