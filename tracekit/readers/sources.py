"""Which files a job consists of: files, folders, globs and fsspec URLs become a list of sources, each file once.

A folder is searched as torch.profiler, tensorboard_trace_handler, torchtitan, dynolog and HTA leave it: traces are told by their ending,
at any depth. What plainly is no trace (manifests, snapshots, reports, hidden files) is passed over in silence; what might have been one
(``.tmp`` left by a killed profiler, files without permission) is listed as skipped.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import BinaryIO
from urllib.parse import unquote

from tracekit.errors import InputError
from tracekit.files import open_regular
from tracekit.notes import text_note
from tracekit.readers import remote
from tracekit.readers.recognise import is_trace_name, read_errors, reason, refusal
from tracekit.trace.events import Coverage

_SURROGATE = re.compile("[\ud800-\udfff]")
#: What may hold traces and is not looked into where it lies in a folder; packings that are not read at all.
_PACKED = re.compile(r"\.(?:zip|tar|tgz|tar\.\w+|json\.(?:xz|bz2|lz4|7z))$", re.IGNORECASE)
_ALIEN = re.compile(r"\.json\.\w+$", re.IGNORECASE)
_MAGIC = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class Source:
    """One trace file. ``url`` is an absolute path or an fsspec URL. ``name`` is for the user: valid UTF-8, but maybe not one line.

    ``size`` in bytes as stored; ``mtime`` in ns since 1970, 0 where the file system does not tell.
    """

    url: str
    name: str
    size: int
    mtime: int

    def open(self) -> BinaryIO:
        """The raw bytes of the file, not decompressed. Opening and reading raise one of :func:`read_errors`."""
        return remote.open_url(self.url) if remote.is_url(self.url) else open_regular(self.url)


@dataclass(frozen=True)
class Found:
    """``sources`` in natural order of their names; ``skipped``: what looked like a trace and is not used."""

    sources: list[Source]
    skipped: list[Coverage]


@dataclass
class _Search:
    """Sources and skipped files so far. ``ids`` tell one file from another, whatever the path that led to it."""

    sources: list[Source] = field(default_factory=list)
    skipped: list[Coverage] = field(default_factory=list)
    ids: set[object] = field(default_factory=set)
    met: int = 0  # files met, those known before included
    packed: list[str] = field(default_factory=list)  # archives and packings that a folder holds; they are read where they are given by name

    def add(self, source: Source, identity: object) -> None:
        self.met += 1
        if identity not in self.ids:
            self.ids.add(identity)
            self.sources.append(source)

    def skip(self, name: str, problem: str, identity: object) -> None:
        self.met += 1
        if identity not in self.ids:
            self.ids.add(identity)
            self.skipped.append(Coverage(name, status="skipped", notes=[text_note(problem)]))


def find_sources(paths: Sequence[str]) -> Found:
    """Trace files under ``paths``: files, folders (searched to any depth), globs, fsspec URLs; ``~`` is the home folder.

    Raises InputError where a path does not exist, or where nothing at all was found.
    """
    seen_files = _Search()
    for path in paths:
        before = seen_files.met
        if remote.is_url(path) and not path.startswith("file://"):
            _remote(path, seen_files)
        else:
            _local(unquote(path.removeprefix("file://")) if path.startswith("file://") else path, seen_files)
        if seen_files.met == before:
            seen_files.skip(clean(path), "holds no trace: no file in it ends in .json, .json.gz or .json.zst", ("empty", path))
    if not seen_files.sources:
        raise _nothing(paths, seen_files)
    sources = sorted(seen_files.sources, key=lambda source: (natural_key(source.name), natural_key(source.url)))
    return Found(_with_distinct_names(sources), sorted(seen_files.skipped, key=lambda coverage: natural_key(coverage.file)))


def natural_key(text: str) -> tuple[tuple[int, int, str], ...]:
    """Sorting key by which ``rank2`` comes before ``rank10``."""
    parts = re.split(r"([0-9]+)", text)
    return tuple((0, len(part.lstrip("0")), part.lstrip("0")) if i % 2 else (1, 0, part) for i, part in enumerate(parts))


# Local files ---------------------------------------------------------------------------------------------------------


def _local(path: str, seen_files: _Search) -> None:
    full = os.path.abspath(os.path.expanduser(path)) if path else ""  # noqa: PTH100, PTH111 - Path("~nobody") raises
    try:
        status = os.stat(full)  # noqa: PTH116 - an empty Path is the current folder
    except PermissionError:
        seen_files.skip(clean(path), "may not be read: permission denied", full)
        return
    except (OSError, ValueError):
        _glob(path, full, seen_files)
        return
    if stat.S_ISDIR(status.st_mode):
        _walk(full, seen_files)
    elif stat.S_ISREG(status.st_mode):
        _file(full, Path(full).name, status, seen_files, named=True)
    else:
        seen_files.skip(clean(path), "is not a regular file and was not read", full)


def _glob(path: str, full: str, seen_files: _Search) -> None:
    """What a pattern matches; InputError for a path that is no pattern, or matches nothing."""
    if not _MAGIC.search(path) or "\0" in path:
        raise InputError(f"there is no file or folder {shown(path)}", "check the path; the folder with the traces of all ranks will do")
    anchor = Path(full).anchor
    try:
        matches = sorted((str(match) for match in Path(anchor).glob(full[len(anchor) :])), key=natural_key)
    except (OSError, ValueError, NotImplementedError) as error:
        raise InputError(f"{shown(path)} is no pattern for files ({reason(error)})", "use *, ?, [...] and ** between slashes") from error
    written = set(Path(full).parts)
    matches = [match for match in matches if not any(p.startswith(".") and p not in written for p in Path(match).parts)]
    if not matches:
        raise InputError(f"no file matches {shown(path)}", "check the pattern, or give the folder itself")
    for match in matches:
        status = _status(match, Path(match).name, seen_files)
        if status is not None and stat.S_ISDIR(status.st_mode):
            _walk(match, seen_files)
        elif status is not None and stat.S_ISREG(status.st_mode):
            _file(match, Path(match).name, status, seen_files, globbed=True)


def _walk(root: str, seen_files: _Search) -> None:
    """Every trace under a folder; a folder reached twice (links in a circle) is searched once."""
    waiting = [root]
    seen: set[object] = set()
    while waiting:
        folder = waiting.pop()
        try:
            identity = _identity(folder, Path(folder).stat())
            if identity in seen:
                continue
            seen.add(identity)
            with os.scandir(folder) as entries:
                names = [entry.name for entry in entries if not entry.name.startswith(".") and entry.name != "__pycache__"]
        except OSError as error:
            name = os.path.relpath(folder, root) if folder != root else Path(root).name
            seen_files.skip(clean(name), f"could not be searched: {reason(error)}", folder)
            continue
        for name in sorted(names):
            path = os.path.join(folder, name)  # noqa: PTH118 - thousands of files
            status = _status(path, os.path.relpath(path, root), seen_files)
            if status is not None and stat.S_ISDIR(status.st_mode):
                waiting.append(path)
            elif status is not None and stat.S_ISREG(status.st_mode):
                _file(path, os.path.relpath(path, root), status, seen_files)


def _status(path: str, name: str, seen_files: _Search) -> os.stat_result | None:
    try:
        return os.stat(path)  # noqa: PTH116 - as above
    except OSError as error:
        if is_trace_name(Path(path).name):
            seen_files.skip(clean(name), f"could not be opened: {reason(error)}", path)
        return None


def _file(path: str, name: str, status: os.stat_result, seen_files: _Search, named: bool = False, globbed: bool = False) -> None:
    problem = refusal(Path(path).name, named, globbed, partial(open_regular, path))
    if problem is None and not os.access(path, os.R_OK):
        problem = "may not be read: permission denied"
    if problem is None:
        seen_files.add(Source(path, clean(name), status.st_size, status.st_mtime_ns), _identity(path, status))
    elif problem:
        seen_files.skip(clean(name), problem, _identity(path, status))
    elif _PACKED.search(name):
        seen_files.packed.append(path)


def _identity(path: str, status: os.stat_result) -> object:
    return (status.st_dev, status.st_ino) if status.st_ino else os.path.realpath(path)


# Remote files --------------------------------------------------------------------------------------------------------


def _remote(url: str, seen_files: _Search) -> None:
    try:
        entries = sorted(remote.entries(url), key=lambda entry: natural_key(entry[0]))
    except ImportError as error:
        raise InputError(f"{shown(url)} needs a package that is missing: {reason(error)}", "try: pip install 'tracekit[remote]'") from error
    except FileNotFoundError as error:
        raise InputError(f"there is no file or folder {shown(url)}", "check the address") from error
    except read_errors() as error:
        raise InputError(f"{shown(url)} could not be read ({reason(error)})", "check the address and your access to it") from error
    for full, name, size, mtime, named in entries:
        problem = refusal(PurePosixPath(name).name, named, False, partial(remote.open_url, full))
        if problem is None:
            seen_files.add(Source(full, clean(name), size, mtime), full)
        elif problem:
            seen_files.skip(clean(name), problem, full)


# Names and messages --------------------------------------------------------------------------------------------------


def _with_distinct_names(sources: list[Source]) -> list[Source]:
    """Files of one name in several places are called by their whole path."""
    names = [source.name for source in sources]
    twice = set(_repeated(names))
    return [replace(source, name=clean(source.url)) if source.name in twice else source for source in sources]


def _repeated(names: list[str]) -> Iterator[str]:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            yield name
        seen.add(name)


def _nothing(paths: Sequence[str], seen_files: _Search) -> InputError:
    searched = ", ".join(shown(path) for path in paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
    problem = f"no trace was found in {searched}" if paths else "no path was given"
    skipped = [coverage for coverage in seen_files.skipped if not coverage.problems[0].startswith("holds no trace")]
    if skipped:
        more = f"; {len(skipped) - 1} more were passed over" if len(skipped) > 1 else ""
        problem += f" ({shown(skipped[0].file)} {skipped[0].problems[0]}{more})"
    if seen_files.packed:
        first, more = shown(seen_files.packed[0]), f" and {len(seen_files.packed) - 1} more" if len(seen_files.packed) > 1 else ""
        remedy = "unpack it" if _ALIEN.search(seen_files.packed[0]) else "give it by its own name, it is read as a folder then"
        return InputError(f"{problem}, but {first}{more}", remedy)
    return InputError(problem, "torch.profiler traces end in .json, .json.gz or .json.zst")


def clean(text: str) -> str:
    """A path as valid UTF-8, whatever bytes the file system holds."""
    return _SURROGATE.sub("\ufffd", text)


def shown(path: str) -> str:
    """A path inside a sentence: quoted, on one line, not endless."""
    text = repr(clean(path))
    return text if len(text) <= 300 else f"{text[:140]}...{text[-140:]}"


__all__ = ["Found", "Source", "clean", "find_sources", "natural_key", "read_errors", "shown"]
