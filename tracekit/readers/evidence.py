"""What a trace tells about its rank, world, process, host, device and backend, each by its own evidence.

``Rank`` of ``record_param_comms`` is the process's rank in the group of the collective: the global rank on the default group. But of a
point-to-point operation it is the peer, and of broadcast, reduce, gather and scatter the root (torch/csrc/distributed/c10d/
ProcessGroupNCCL.cpp), so only symmetric collectives on the default group count.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekit.notes import Note, note
from tracekit.trace.events import Category, RankTables
from tracekit.units import NULL, NULL32

_LARGEST_WORLD = 10_000_000
#: "rank" with the word before it; words that make it another rank than the global one.
_RANK = re.compile(r"(?<![A-Za-z])(?:(?P<word>[A-Za-z]+)(?P<gap>[-_.]?))?rank[-_.=]?(?P<rank>[0-9]{1,7})(?![0-9])", re.IGNORECASE)
_OTHER_RANKS = frozenset(
    ("local", "node", "group", "intra", "inter", "tp", "pp", "dp", "cp", "ep", "mp", "etp", "sp", "fsdp", "replica", "shard")
)
_WORKER = re.compile(r"(?<![A-Za-z])worker[-_]?(?P<rank>[0-9]{1,7})(?![0-9])", re.IGNORECASE)
_SHORT = re.compile(r"(?:^|[-_.])r(?P<rank>[0-9]{1,7})(?=[-_.]|$)", re.IGNORECASE)
#: Name that tensorboard_trace_handler gives: HOST_PID.TIME.pt.trace.json
_HOST_PID = re.compile(r"^(?P<host>.+)_(?P<pid>[0-9]{1,10})\.[0-9]{10,}\.pt\.trace\.json", re.DOTALL)
_SYMMETRIC = re.compile(r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|barrier", re.IGNORECASE)
_BACKENDS = ("nccl", "rccl", "gloo", "mpi", "ucc", "xccl", "hccl")


def distributed_infos(metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every distributedInfo of the file: mostly one or none."""
    listed = metadata.get("_distributedInfo_all")
    candidates = listed if isinstance(listed, list) else [metadata.get("distributedInfo")]
    return [info for info in candidates if isinstance(info, dict)]


def rank_of_name(file_name: str, host: str = "") -> int | None:
    """The rank that a file name tells, else the nearest folder that does; None where it tells none, or several.

    A process id, a time, a local rank, or the number of a host (``host``: the HOST of HOST_PID.TIME.pt.trace.json) is no rank.
    """
    for part in reversed(re.split(r"[/\\]", file_name)):
        after_host = part.removeprefix(host)
        for ranks in (_ranks_called_so(part), _numbers(_WORKER, after_host), _numbers(_SHORT, after_host)):
            if ranks:
                return ranks.pop() if len(ranks) == 1 else None
    return None


def _ranks_called_so(text: str) -> set[int]:
    found: dict[bool, set[int]] = {True: set(), False: set()}
    for match in _RANK.finditer(text):
        word = (match["word"] or "").lower()
        if word == "global" or (word not in _OTHER_RANKS and (match["gap"] or not word)):
            found[word == "global"].add(int(match["rank"]))
    return found[True] or found[False]


def _numbers(pattern: re.Pattern[str], text: str) -> set[int]:
    return {int(match["rank"]) for match in pattern.finditer(text)}


def rank_of_records(tables: RankTables, world: int | None) -> int | None:
    """``Rank`` of the symmetric collectives on the default group, where all agree."""
    rows, size = _default_group_rows(tables, world)
    ranks = tables.side["communication"].columns["Rank"][rows] if "communication" in tables.side else np.empty(0, np.int64)
    ranks = np.unique(ranks[ranks != NULL])
    if len(ranks) != 1 or ranks[0] < 0 or (size is not None and ranks[0] >= size):
        return None
    return int(ranks[0])


def _default_group_rows(tables: RankTables, world: int | None) -> tuple[npt.NDArray[Any], int | None]:
    """Rows of the communication table with symmetric collectives on the default group, and that group's size where recorded."""
    side = tables.side.get("communication")
    if side is None or not len(side):
        return np.empty(0, np.int64), None
    column = side.columns
    symmetric = tables.each_text(column["Collective name"], lambda name: _SYMMETRIC.search(name) is not None)
    described = tables.each_text(column["Process Group Description"], lambda text: text == "default_pg")
    sizes = column["Group size"]
    first = tables.each_text(column["Process Group Name"], lambda text: text == "0")
    start, stride = column["Global rank start"], column["Global rank stride"]
    regular = ((start == NULL) | (start == 0)) & ((stride == NULL) | (stride == 1) | (sizes == 1))
    largest = world if world is not None else int(sizes.max(initial=NULL))
    default = described | (first & regular & (sizes == largest) & (sizes != NULL))
    rows = np.flatnonzero(symmetric & default)
    known = np.unique(sizes[rows][sizes[rows] != NULL])
    return rows, int(known[0]) if len(known) == 1 else None


def world_size(infos: list[dict[str, Any]], tables: RankTables) -> tuple[int | None, list[Note]]:
    """Ranks of the job, by distributedInfo, else by the size of the default group (None: neither tells), and what is odd about it.

    A default group of more ranks than ``world_size`` says is believed: it is what the collectives used.
    """
    said = next((size for info in infos if (size := count_of(info.get("world_size"), 1)) is not None), None)
    size = next((size for info in infos if (size := _default_group_of(info)) is not None), None)
    if said is not None and size is not None and size > said:
        return size, [note("world_too_small", said=said, size=size)]
    if said is not None or size is not None:
        return said if said is not None else size, []
    size = _default_group_rows(tables, None)[1]
    return (size if size is not None and 0 < size <= _LARGEST_WORLD else None), []


def _default_group_of(info: Mapping[str, Any]) -> int | None:
    groups = info.get("pg_config")
    for group in groups if isinstance(groups, list) else []:
        if isinstance(group, dict) and group.get("pg_desc") == "default_pg" and (size := count_of(group.get("pg_size"), 1)):
            return size
    return None


def count_of(value: Any, least: int) -> int | None:
    """A number of ranks, or a rank, however it is written; None for what cannot be one."""
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,8}", value.strip()):
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and least <= value <= _LARGEST_WORLD else None


# Process, host, device, backend --------------------------------------------------------------------------------------


def process_id(tables: RankTables) -> int | None:
    """Process id of the operators, else of annotations, else of the runtime calls."""
    for category in (Category.OPERATOR, Category.USER_ANNOTATION, Category.RUNTIME, Category.PYTHON):
        lanes = tables.lane[tables.category == category]
        if not len(lanes):
            continue
        events: dict[int, int] = {}
        for lane, count in enumerate(np.bincount(lanes, minlength=len(tables.lanes)).tolist()):
            pid = tables.lanes[lane].pid
            if count and isinstance(pid, int):
                events[pid] = events.get(pid, 0) + count
        if events:
            return max(events, key=lambda pid: events[pid])
    return None


def host_of_name(file_name: str, tables: RankTables) -> str:
    """HOST of HOST_PID.TIME.pt.trace.json, if PID really is a process of the trace (``worker0_step_12.169...`` looks the same)."""
    match = _HOST_PID.match(re.split(r"[/\\]", file_name)[-1])
    if match is None:
        return ""
    pid = match["pid"]
    return match["host"] if any(str(lane.pid) == pid for lane in tables.lanes) else ""


def device_name(tables: RankTables) -> str:
    """Name of the device that ran most kernels; of the first one where there are no kernels."""
    listed = tables.metadata.get("deviceProperties")
    devices = [device for device in listed if isinstance(device, dict)] if isinstance(listed, list) else []
    if not devices:
        return ""
    used = tables.device[(tables.category == Category.KERNEL) & (tables.device != NULL32)]
    chosen = devices[0]
    if len(devices) > 1 and len(used):
        ids, counts = np.unique(used, return_counts=True)
        most = int(ids[counts.argmax()])
        chosen = next((device for device in devices if count_of(device.get("id"), 0) == most), chosen)
    name = chosen.get("name")
    return name if isinstance(name, str) else ""


def backend_of_events(tables: RankTables) -> str:
    """Backend by the names of annotations (``gloo:all_reduce``) and kernels (``ncclDevKernel_...``); '' where none is seen."""
    wanted = (Category.USER_ANNOTATION, Category.GPU_ANNOTATION, Category.KERNEL, Category.OPERATOR)
    used = tables.name[np.isin(tables.category, [int(category) for category in wanted])]
    names = [tables.text(code).lower() for code in np.flatnonzero(np.bincount(used)).tolist()]
    for backend in _BACKENDS:
        if any(re.match(backend + r"(?::|symk|[a-z0-9_]*kernel)", name) for name in names):
            return backend
    return ""
