"""An archive of traces (``.tar``, ``.tar.gz``, ``.tgz``, ``.tar.xz``, ``.zip``) is a folder: unpacked to a scratch folder while it is read.

Only regular files are taken, under names that stay inside the folder; what they may hold in all is bounded, so that a small archive cannot
fill the disk.
"""

from __future__ import annotations

import contextlib
import lzma
import re
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO

from tracekit.errors import InputError
from tracekit.files import open_regular
from tracekit.readers import remote
from tracekit.readers.recognise import read_errors, reason
from tracekit.readers.sources import shown

_ARCHIVE = re.compile(r"\.(?:zip|tar|tgz|tar\.(?:gz|bz2|xz))$", re.IGNORECASE)
_MOST_FILES = 200_000
#: Of the free space of the disk for scratch files, what an archive may take.
_DISK_SHARE = 0.5
_PIECE = 1 << 20


def is_archive(path: str) -> bool:
    """Whether a path is taken for an archive by its name."""
    return _ARCHIVE.search(path) is not None


@contextlib.contextmanager
def as_folders(paths: Sequence[str]) -> Iterator[tuple[list[str], dict[str, str]]]:
    """(paths with every archive replaced by the folder it was unpacked to, that folder -> archive). The folders go with the block.

    Raises InputError for an archive that cannot be unpacked.
    """
    with contextlib.ExitStack() as scratch:
        result, origin = [], {}
        for path in paths:
            if is_archive(path) and (remote.is_url(path) or Path(path).is_file()):
                folder = scratch.enter_context(tempfile.TemporaryDirectory(prefix="tracekit-"))
                _unpack(path, Path(folder))
                origin[folder] = path
                result.append(folder)
            else:
                result.append(path)
        yield result, origin


def _unpack(path: str, folder: Path) -> None:
    left = int(shutil.disk_usage(folder).free * _DISK_SHARE)
    try:
        with remote.open_url(path) if remote.is_url(path) else open_regular(path) as file:
            for number, (name, member) in enumerate(_members(path, file)):
                if number >= _MOST_FILES:
                    raise InputError(f"{shown(path)} holds more than {_MOST_FILES:,} files", "unpack what is needed, and give the folder")
                left = _copy(member, folder / name, left, path)
    except _errors() as error:
        raise InputError(f"the archive {shown(path)} could not be read ({reason(error)})", "unpack it, and give the folder") from error


def _errors() -> tuple[type[BaseException], ...]:
    packing = (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError)
    return (*read_errors(), *packing, RuntimeError, NotImplementedError)  # the last two: zipfile's, for encryption and odd methods


def _members(path: str, file: BinaryIO) -> Iterator[tuple[str, IO[bytes]]]:
    """(name, content) of each regular file that has a name inside the folder."""
    if path.lower().endswith(".zip"):
        with zipfile.ZipFile(file) as bundle:
            for entry in bundle.infolist():
                if not entry.is_dir() and (name := _inside(entry.filename)):
                    with bundle.open(entry) as member:
                        yield name, member
        return
    with tarfile.open(fileobj=file, mode="r|*") as archive:
        for info in archive:
            member_or_none = archive.extractfile(info) if info.isreg() else None
            if member_or_none is not None and (name := _inside(info.name)):
                yield name, member_or_none


def _inside(name: str) -> str:
    """The name as a path below the folder; '' for one that leads out of it or cannot be a name."""
    parts = [part for part in PurePosixPath(name.replace("\\", "/")).parts if part not in ("/", ".")]
    bad = not parts or ".." in parts or "\0" in name or any(len(part.encode("utf-8", "replace")) > 255 for part in parts)
    return "" if bad else str(PurePosixPath(*parts))


def _copy(member: IO[bytes], target: Path, left: int, path: str) -> int:
    """Write one file; what may still be written [bytes]."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as out:
        while piece := member.read(_PIECE):
            left -= len(piece)
            if left < 0:
                raise InputError(f"{shown(path)} holds more than half of the free disk space", "unpack what is needed, and give the folder")
            out.write(piece)
    return left
