"""Dumps of torch's flight recorder, as pickle or JSON, of NCCL, gloo and kin, versions 2.0 to 2.10: one rank's calls as arrays.

A pickle comes from a stranger: its bytes are looked at before anything is built (``pickle_bounds``), and only plain values are. A file
that ends in the middle is refused too, with its name: half a pickle has no entries yet.
"""

from __future__ import annotations

import gc
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from tracekit.collectives.kinds import kind_of_collective_name
from tracekit.errors import InputError
from tracekit.readers.hang_files import DONE, SCHEDULED, STARTED, Calls, Dump, Frame, GroupInfo, rank_of_name
from tracekit.readers.pickle_bounds import MOST_VALUES, UnboundedError, load_plain
from tracekit.readers.plain_pickle import DAMAGED, RefusedError
from tracekit.readers.sources import Source
from tracekit.readers.whole import read_whole

LARGEST_FILE = 1 << 29
#: Entries of one rank, groups, frames of a stack and characters of a text that are looked at; stacks of unfinished calls that are kept.
MOST_ENTRIES, MOST_GROUPS, MOST_FRAMES, LONGEST_TEXT, MOST_STACKS = 200_000, 4096, 128, 300, 64
#: Tensors of a call that are shown, and that are looked at.
_MOST_SHAPES, MOST_TENSORS = 8, 4096
_REMEDY = "dump it again, or take a copy that is whole"
_P2P = re.compile(r"^(send|recv) (\d{1,7})\s*(->|<-)\s*(\d{1,7})$")
_RANKS = re.compile(r"-?\d{1,9}")
#: Files whose frames are not the program's own.
_LIBRARY = re.compile(
    r"(?:^|/)(?:site-packages|dist-packages|python3\.\d+|multiprocessing|importlib|concurrent)/|^torch/|^<frozen"
    r"|(?:^|/)tracekit/recorder/|(?:^|/)(?:threading|runpy|contextlib)\.py$"
)


#: What a damaged pickle or JSON raises.
_DAMAGED = (*DAMAGED, msgspec.DecodeError, EOFError, MemoryError)
_NO_MORE = "dump it with its collectives (includeCollectives)"


def read_dump(source: Source) -> Dump:
    """One rank's dump. Raises InputError for what is none, or wants more than plain values."""
    root = _root(source)
    entries = root.get("entries")
    if not isinstance(entries, list):
        raise InputError(f"{source.name}: the flight recorder dump holds no entries", _NO_MORE)
    return _Reader(source.name, root).dump([entry for entry in entries[:MOST_ENTRIES] if isinstance(entry, dict)])


def _root(source: Source) -> Mapping[str, Any]:
    data = read_whole(source.name, source.open, LARGEST_FILE, _REMEDY)
    try:
        root = _unpickled(data) if data[:1] == b"\x80" else _parsed(data)
    except UnboundedError as error:
        raise InputError(f"{source.name}: the flight recorder dump {error}", _REMEDY) from error
    except RefusedError as error:
        raise InputError(f"{source.name} is a pickle that {error}: it was not loaded", "only plain values are read from a dump") from error
    except _DAMAGED as error:
        raise InputError(f"{source.name}: the flight recorder dump is damaged or cut ({type(error).__name__})", _REMEDY) from error
    if isinstance(root, list):
        return {"entries": root}  # torch 2.2 dumped the entries alone
    if not isinstance(root, dict):
        raise InputError(f"{source.name} is no flight recorder dump", _REMEDY)
    return root


def _unpickled(data: bytes) -> Any:
    on = gc.isenabled()
    gc.disable()
    try:
        return load_plain(data)
    finally:
        if on:
            gc.enable()


def _parsed(data: bytes) -> Any:
    if data.count(b",") + data.count(b"[") + data.count(b"{") > MOST_VALUES:
        raise UnboundedError(f"holds more than {MOST_VALUES:,} values")
    return msgspec.json.decode(data)


class _Reader:
    """Turns one dump into arrays."""

    def __init__(self, name: str, root: Mapping[str, Any]) -> None:
        self._name = name
        self._version = _text(root.get("version", "?"))
        self._config = _config(root.get("pg_config"))
        self._status = root.get("pg_status")
        self._rank = _whole(root.get("rank"), -1)
        self._groups: dict[tuple[str, str], int] = {}
        self._texts: dict[str, int] = {"": 0}
        # By identity: everything that was read stays alive. torch writes each frame once.
        self._sites: dict[tuple[int, ...], int] = {}
        self._libraries: dict[Any, bool] = {}
        self._kinds: dict[Any, tuple[str, int, int]] = {}

    def dump(self, entries: Sequence[Mapping[str, Any]]) -> Dump:
        rows = [self._row(entry) for entry in entries]
        columns = np.array(rows, np.int64).reshape(len(rows), 9)
        names = ("group", "kind", "seq", "source", "destination", "state", "created_ns", "what", "site")
        data: dict[str, Any] = {name: columns[:, place].copy() for place, name in enumerate(names)}
        data["state"] = data["state"].astype(np.int8)
        calls = Calls(**data)
        groups = [GroupInfo(name, description, self._ranks(name, description)) for name, description in self._groups]
        return Dump(
            file=self._name,
            rank=self._rank if self._rank >= 0 else rank_of_name(self._name),
            version=self._version,
            groups=groups,
            texts=list(self._texts),
            calls=calls,
            stacks=self._stacks(entries, calls),
            enqueued=self._enqueued(),
        )

    def _row(self, entry: Mapping[str, Any]) -> tuple[int, ...]:
        kind, source, destination = self._kind(entry.get("profiling_name"))
        p2p = source >= 0
        seq = entry.get("p2p_seq_id") if p2p else entry.get("collective_seq_id", entry.get("seq_id"))
        return (
            self._group(entry),
            self._text(kind),
            _whole(seq, -1),
            source,
            destination,
            _state(entry),
            _whole(entry.get("time_created_ns"), 0),
            self._what(entry),
            self._site(entry.get("frames")),
        )

    def _group(self, entry: Mapping[str, Any]) -> int:
        given = entry.get("process_group")
        pair = given if isinstance(given, (tuple, list)) and len(given) == 2 else (entry.get("pg_id", "?"), "")
        key = (_text(pair[0]), _text(pair[1]))
        if key not in self._groups and len(self._groups) >= MOST_GROUPS:
            raise InputError(f"{self._name}: more than {MOST_GROUPS} process groups", _REMEDY)
        return self._groups.setdefault(key, len(self._groups))

    def _ranks(self, name: str, description: str) -> tuple[int, ...] | None:
        """The members that the dump lists; gloo keeps the default group under an empty name."""
        if name in self._config:
            return self._config[name]
        return self._config.get("") if description == "default_pg" else None

    def _what(self, entry: Mapping[str, Any]) -> int:
        given, taken = (
            f"{sizes_text(entry.get(f'{way}_sizes'))} {_types(entry.get(f'{way}_dtypes'))}".strip() for way in ("input", "output")
        )
        return self._text(given if given == taken else " -> ".join(part for part in (given, taken) if part))

    def _site(self, frames: Any) -> int:
        """The first frame outside of torch and Python's own files."""
        if not isinstance(frames, list) or not frames:
            return 0
        key = tuple(map(id, frames[:MOST_FRAMES]))
        known = self._sites.get(key)
        if known is None:
            own = next((frame for frame in frames[:MOST_FRAMES] if isinstance(frame, dict) and not self._is_library(frame)), None)
            known = 0 if own is None else self._text(f"{_text(own.get('filename'))}:{_whole(own.get('line'), 0)}")
            self._sites[key] = known
        return known

    def _is_library(self, frame: Mapping[str, Any]) -> bool:
        path = frame.get("filename")
        if not isinstance(path, str):
            return True
        known = self._libraries.get(path)
        if known is None:
            known = self._libraries[path] = is_library(path)
        return known

    def _kind(self, name: Any) -> tuple[str, int, int]:
        text = _text(name)
        found = self._kinds.get(text)
        if found is None:
            found = self._kinds[text] = _kind(text)
        return found

    def _text(self, text: str) -> int:
        return self._texts.setdefault(text, len(self._texts))

    def _stacks(self, entries: Sequence[Mapping[str, Any]], calls: Calls) -> dict[int, list[Frame]]:
        """Stacks of the calls that are not done, and of the last one of each group."""
        open_calls = np.flatnonzero(calls.state != DONE)[:MOST_STACKS].tolist()
        last = {int(group): place for place, group in enumerate(calls.group.tolist())}
        return {place: frames for place in {*open_calls, *last.values()} if (frames := frames_of(entries[place].get("frames")))}

    def _enqueued(self) -> dict[str, int]:
        status = self._status if isinstance(self._status, dict) else {}
        found = {
            _text(name): row.get("last_enqueued_collective") for name, row in list(status.items())[:MOST_GROUPS] if isinstance(row, dict)
        }
        return {name: number for name, number in found.items() if isinstance(number, int) and 0 <= number < 2**62}


def is_library(path: Any) -> bool:
    """Whether a file is torch's, an installed package's or Python's own."""
    return not isinstance(path, str) or _LIBRARY.search(path) is not None


def frames_of(frames: Any) -> list[Frame]:
    """A stack as it stands in an entry."""
    if not isinstance(frames, list):
        return []
    found = [frame for frame in frames[:MOST_FRAMES] if isinstance(frame, dict)]
    return [Frame(_text(frame.get("name")), _text(frame.get("filename")), _whole(frame.get("line"), 0)) for frame in found]


def _kind(name: str) -> tuple[str, int, int]:
    """(kind, source, destination within the group) of ``nccl:all_reduce`` or ``nccl:recv 3<-0``."""
    text = name.partition(":")[2] or name
    match = _P2P.match(text)
    if match is None:
        return kind_of_collective_name(text) or text, -1, -1
    first, second = int(match[2]), int(match[4])
    return match[1], *((first, second) if match[3] == "->" else (second, first))


def _state(entry: Mapping[str, Any]) -> int:
    """``retired`` is set when the call is over; gloo never changes ``state``."""
    if entry.get("state") == "completed" or entry.get("retired") is True:
        return DONE
    return STARTED if entry.get("state") == "started" else SCHEDULED


def _config(given: Any) -> dict[str, tuple[int, ...] | None]:
    """Group name -> its global ranks, which stand as the text of a list."""
    found: dict[str, tuple[int, ...] | None] = {}
    for name, row in list(given.items())[:MOST_GROUPS] if isinstance(given, dict) else []:
        ranks = row.get("ranks") if isinstance(row, dict) else None
        numbers = [int(n) for n in _RANKS.findall(ranks[: 1 << 20])] if isinstance(ranks, str) else ranks
        whole = isinstance(numbers, list) and numbers and all(isinstance(n, int) and 0 <= n < 2**31 for n in numbers)
        cut = isinstance(ranks, str) and "..." in ranks
        found[_text(name)] = tuple(numbers) if whole and not cut and numbers is not None else None
    return found


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value[:LONGEST_TEXT]
    return str(value) if type(value) is int and abs(value) < 2**63 else ""


def _whole(value: Any, otherwise: int) -> int:
    return value if type(value) is int and abs(value) < 2**62 else otherwise


def sizes_text(shapes: Any) -> str:
    """``[[4,1024],[3]]``; of many tensors the first few, how many there are, and their elements."""
    if not isinstance(shapes, list) or not shapes:
        return "[]" if shapes == [] else ""
    if len(shapes) == 1:
        return f"[{_shape_text(shapes[0])}]"
    shown = [_shape_text(shape) for shape in shapes[:_MOST_SHAPES]]
    if len(shapes) > _MOST_SHAPES:
        known = [shape for shape in shapes[:MOST_TENSORS] if isinstance(shape, list)]
        elements = sum(math.prod(_whole(length, 0) for length in shape[:_MOST_SHAPES]) for shape in known)
        shown.append(f"... {len(shapes)} tensors of {elements} elements")
    return f"[{','.join(shown)}]"[:LONGEST_TEXT]


def _shape_text(shape: Any) -> str:
    if not isinstance(shape, list):
        return _text(shape)
    return f"[{','.join([str(n) if type(n) is int and abs(n) < 2**63 else '?' for n in shape[:_MOST_SHAPES]])}]"


def _types(value: Any) -> str:
    if not isinstance(value, list):
        return _text(value)
    return _text(value[0]) if len(value) == 1 else ",".join(sorted({_text(item) for item in value[:MOST_TENSORS]}))[:LONGEST_TEXT]
