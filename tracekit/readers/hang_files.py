"""What is left of a job that stands still: flight recorder dumps, Python stacks, NCCL's log; told by content, whatever their names.

Every reader gives plain tables of one rank, so that ``analyses/hang`` can lay all ranks side by side.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from tracekit.readers.whole import head_of
from tracekit.trace.events import Int64Array

Content = Literal["flight_recorder", "stacks", "nccl_log", "ras_json"]

_HEAD = 1 << 16
_STACKS = re.compile(
    rb"^(?:Current thread 0x|Thread 0x|Thread \d+ \((?:idle|active)|Traceback \(most recent call last\)|Fatal Python error:|Timeout \()",
    re.M,
)
_NCCL = re.compile(rb"NCCL (?:INFO|WARN|TRACE)|^[NR]CCL version \d", re.M)
#: What only a dump of the flight recorder has.
_DUMP = (b"pg_status", b"profiling_name", b"collective_seq_id", b"pg_config", b"time_discovered_started_ns")


@dataclass(frozen=True)
class Frame:
    """One line of a stack, innermost first in a list of them."""

    name: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.name} ({self.file}:{self.line})"


@dataclass(frozen=True)
class GroupInfo:
    """A process group as one rank's dump has it: ``ranks`` are global, None where the dump does not say."""

    name: str
    description: str
    ranks: tuple[int, ...] | None


@dataclass(frozen=True)
class Calls:
    """Entries of one dump in the order in which they were made: one entry each.

    ``group`` indexes Dump.groups, ``kind``, ``what`` (sizes and types) and ``site`` (the first frame outside of libraries) Dump.texts.
    ``source`` and ``destination`` are ranks within the group, -1 for a collective. ``state``: 0 scheduled, 1 started, 2 done.
    """

    group: Int64Array
    kind: Int64Array
    seq: Int64Array
    source: Int64Array
    destination: Int64Array
    state: npt.NDArray[np.int8]
    created_ns: Int64Array
    what: Int64Array
    site: Int64Array

    def __len__(self) -> int:
        return len(self.group)


SCHEDULED, STARTED, DONE = 0, 1, 2
#: Version of a dump that was made from a trace.
FROM_TRACE = "trace"
STATES = ("scheduled", "started", "completed")


@dataclass(frozen=True)
class Dump:
    """The flight recorder of one rank. ``stacks``: of the entries that may be needed, by their place. ``notes``: what was odd."""

    file: str
    rank: int | None
    version: str
    groups: list[GroupInfo]
    texts: list[str]
    calls: Calls
    stacks: dict[int, list[Frame]]
    enqueued: dict[str, int]  # group name -> number of its last collective, where the dump tells
    notes: list[str] = field(default_factory=list)
    ending: str = ""  # of one made from a trace: what there is to say of how the trace ends


@dataclass(frozen=True)
class Stacks:
    """Python stacks of one rank's threads, innermost frame first, the main thread first. ``error``: the exception that ended it."""

    file: str
    rank: int | None
    threads: list[list[Frame]]
    error: str = ""


@dataclass
class NcclCommunicator:
    """One communicator of one process: ``rank`` within it, ``ranks`` in it, ``name``: commId, the same for all its ranks, else its address.

    ``kind`` and ``count``: its last call, and how many it had made before; -1 where the log has no calls. ``channels``, ``nodes``: 0 where
    not told.
    """

    rank: int
    ranks: int
    name: str
    process: str
    complete: bool = False
    kind: str = ""
    count: int = -1
    channels: int = 0
    nodes: int = 0


@dataclass(frozen=True)
class NcclLate:
    """What RAS says of ranks of a communicator (name; '' where it says it of processes): they are behind, or do not answer (``gone``).

    ``ranks`` is empty where RAS does not list them, ``number`` is how many they are. They have launched ``operation`` calls,
    ``ahead`` others ``most``.
    """

    communicator: str
    ranks: list[int]
    number: int = 0
    operation: int = 0
    ahead: int = 0
    most: int = 0
    kind: str = ""
    gone: str = ""


@dataclass(frozen=True)
class NcclLog:
    """What NCCL_DEBUG=INFO told, of one process or several, or RAS (``ras``)."""

    file: str
    rank: int | None
    communicators: list[NcclCommunicator]
    warnings: list[str]
    version: str = ""
    network: str = ""
    late: list[NcclLate] = field(default_factory=list)
    ras: bool = False


HangFile = Dump | Stacks | NcclLog


def content_of(opener: Callable[[], BinaryIO]) -> Content | None:
    """What kind of evidence a file is, by its first bytes; None for any other file. Raises one of ``recognise.read_errors()``."""
    return content_of_head(head_of(opener, _HEAD))


def content_of_head(head: bytes) -> Content | None:
    """The same from the first bytes."""
    if head.lstrip()[:1] == b"{" and b'"nccl_version"' in head and b'"communicators' in head and b'"traceEvents"' not in head:
        return "ras_json" if not any(word in head for word in _DUMP) else "flight_recorder"
    if head[:1] == b"\x80" or head.lstrip()[:1] == b"{":
        words = sum(word in head for word in _DUMP)
        return "flight_recorder" if words >= 2 and b'"traceEvents"' not in head and b"device_traces" not in head else None
    if _NCCL.search(head):
        return "nccl_log"
    return "stacks" if _STACKS.search(head) else None


_RANK_WORD = re.compile(r"rank[_\-]?0*(\d{1,7})(?!\d)", re.IGNORECASE)
_LAST_NUMBER = re.compile(r"(\d{1,7})\D*$")


def rank_of_name(name: str) -> int | None:
    """The rank in a file's name: behind the word ``rank``, else its last number (``nccl_trace_rank_node01_12`` is 12)."""
    stem = name.rpartition("/")[2]
    stem = re.sub(r"(?:\.(?:pickle|pkl|json|txt|log|stacks|out|err|gz|zst))+$", "", stem)
    found = _LAST_NUMBER.search(stem) if re.search(r"\d$", stem) else _RANK_WORD.search(stem) or _LAST_NUMBER.search(stem)
    return int(found[1]) if found else None
