"""A job as Holistic Trace Analysis reads one: a folder with one Chrome trace a rank, named and numbered by rank.

What HTA stumbles over is gone from these files: events that are broken, ranks that a file does not tell or that two files claim, clocks of
several hosts, years of spellings of a category. Times count from shortly before the job's first event, exact to the nanosecond. Arguments
that tracekit has read are carried over under their names: correlation, stream, sizes, shapes, what NCCL says of a collective, Python's
calls. Arrows, instants and counters of the file are not; HTA drops instants and counters itself.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from isal import igzip

from tracekit.errors import InputError, UsageError
from tracekit.export import chrome
from tracekit.export.hta import SPELLED
from tracekit.files import write_by
from tracekit.job.activity import Activity
from tracekit.job.model import Job
from tracekit.trace.events import NULL, NULL32, SIDE_COLUMNS, BoolArray, Category, Int64Array, RankTables

#: The reducer's name among those of the analyses.
REDUCER = "export_hta_files"
_gzip: Any = igzip.open
#: Side tables whose columns become arguments; ``memory`` belongs to instants.
_SIDES = [name for name in SIDE_COLUMNS if name != "memory"]
#: What the times count from lies so long before the first event. HTA keeps the host's events up to the end of the last step, but compares
#: starts counted from the first event with ends that are not: with recorded times all stay. A float holds these to the nanosecond as well.
LEAD_NS = 1_000_000_000_000
#: What of a file's head goes on.
_ABOUT = ("distributedInfo", "deviceProperties")
#: HTA takes every file of a folder that ends like this for a rank's trace.
_TRACES = (".json", ".gz")


@dataclass(frozen=True)
class PutAside:
    """Where the events of a window lie (Arrow IPC: what stands before and behind the times, the times), how many there are, and what the
    file says of its rank, groups and devices."""

    path: str
    first_ns: int
    events: int
    about: dict[str, Any]


@dataclass(frozen=True)
class Spool:
    """A reducer that makes the text of each event and writes it into ``folder``, which outlives the reading; clocks are not known yet."""

    folder: str
    scratch: ClassVar[bool] = True

    def __call__(self, activity: Activity) -> PutAside | None:
        """Put the window's complete events aside; None where there are none."""
        tables = activity.tables
        rows = tables.rows(*SPELLED)
        rows = rows[(tables.ts[rows] != NULL) & (tables.dur[rows] >= 0)]
        if not len(rows):
            return None
        handle, path = tempfile.mkstemp(".arrow", "window-", self.folder)
        schema = pa.schema([("before", pa.large_string()), ("ts", pa.int64()), ("dur", pa.int64()), ("behind", pa.large_string())])
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with os.fdopen(handle, "wb") as stream, pa.ipc.new_file(stream, schema, options=options) as file:
            for begin in range(0, len(rows), chrome.ROWS):
                some = rows[begin : begin + chrome.ROWS]
                columns = [_before(tables, some), pa.array(tables.ts[some]), pa.array(tables.dur[some]), _behind(tables, some)]
                file.write_batch(pa.record_batch(columns, schema=schema))
        about = {key: tables.metadata[key] for key in _ABOUT if isinstance(tables.metadata.get(key), dict | list)}
        return PutAside(path, int(tables.ts[rows].min()), len(rows), about)


def _before(tables: RankTables, rows: Int64Array) -> Any:
    """What stands before the times: category, name, process and thread."""
    lanes = [f'"pid":{json.dumps(lane.pid)},"tid":{json.dumps(lane.tid)},"ts":' for lane in tables.lanes]
    spelled = [chrome.quoted(SPELLED.get(Category(code), "")) for code in range(max(Category) + 1)]
    return chrome.joined(
        '{"ph":"X","cat":', chrome.chosen(spelled, tables.category[rows].astype(np.int64)),
        ',"name":', _texts(tables, tables.name[rows], chrome.quoted), ",", chrome.chosen(lanes, tables.lane[rows].astype(np.int64)),
    )  # fmt: skip


def _behind(tables: RankTables, rows: Int64Array) -> Any:
    """The arguments, each only where the event has it."""
    found = [
        _argument("stream", chrome.numbers(tables.stream[rows].astype(np.int64)), tables.stream[rows] != NULL32),
        _argument("correlation", chrome.numbers(tables.correlation[rows]), tables.correlation[rows] != NULL),
        _argument("External id", chrome.numbers(tables.external_id[rows]), tables.external_id[rows] != NULL),
        *(column for side in _SIDES for column in _side(tables, rows, side)),
    ]
    arguments = pc.utf8_slice_codeunits(chrome.joined(*found), 1)  # without the first comma
    return chrome.joined(',"args":{', arguments, "}}")


def _argument(name: str, texts: Any, there: BoolArray) -> Any:
    whole = chrome.joined(f",{chrome.quoted(name)}:", texts)
    return pc.if_else(pa.array(there), whole, pa.scalar("", pa.large_string()))


def _side(tables: RankTables, rows: Int64Array, side: str) -> Iterator[Any]:
    """The arguments of one side table, a column each that occurs."""
    at = tables.side[side].at(rows)
    there = at >= 0
    if not there.any():
        return
    for name, kind in SIDE_COLUMNS[side].items():
        values = tables.side[side].columns[name][at]
        given = there & (values != (0 if kind in ("str", "json") else NULL))
        if not given.any():
            continue
        if kind in ("str", "json"):
            yield _argument(name, _texts(tables, np.where(given, values, 0), chrome.quoted if kind == "str" else _valid), given)
        elif kind == "micro":
            whole = chrome.joined(chrome.numbers(np.where(given, values, 0)), "e-6")
            yield _argument(name, whole, given)
        else:
            yield _argument(name, chrome.numbers(values), given)


def _texts(tables: RankTables, codes: Any, written: Callable[[str], str]) -> Any:
    """A text a row, each different one made once."""
    used, place = np.unique(codes, return_inverse=True)
    return chrome.chosen([written(tables.text(int(code))) for code in used], place.reshape(-1).astype(np.int64))


def _valid(text: str) -> str:
    """JSON that stood in the file, or null: a broken file may have anything there."""
    try:
        return json.dumps(json.loads(text), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    except (ValueError, RecursionError):
        return "null"


def write(folder: str, job: Job) -> dict[int, int]:
    """Write ``rank_N.json.gz`` of every rank with events: the events of each. The job was read with the reducer ``REDUCER``.

    Of a rank with several recordings the first is written. Raises UsageError where the folder holds traces that HTA would read as well.
    """
    chosen: dict[int, tuple[int, PutAside]] = {}
    for rank, index, aside in job.reduced(REDUCER):
        if aside is not None:
            chosen.setdefault(rank, (index, aside))
    if not chosen:
        raise InputError("no rank has events that Holistic Trace Analysis could look at")
    names = {rank: f"rank_{rank}.json.gz" for rank in chosen}
    _look(folder, set(names.values()))
    base = min(int(job.aligned(index, aside.first_ns)) for index, aside in chosen.values()) - LEAD_NS
    for rank, (index, aside) in chosen.items():
        write_by(Path(folder) / names[rank], lambda name, at=(rank, index, aside): _write(name, job, base, *at))  # type: ignore[misc]
    return {rank: aside.events for rank, (_, aside) in chosen.items()}


def _look(folder: str, written: set[str]) -> None:
    Path(folder).mkdir(exist_ok=True)
    others = sorted(path.name for path in Path(folder).iterdir() if path.name.endswith(_TRACES) and path.name not in written)
    if others:
        problem = f"{folder} holds {others[0]}, which Holistic Trace Analysis would read as well"
        raise UsageError(problem, "give a folder of its own")


def _write(name: str, job: Job, base: int, rank: int, index: int, aside: PutAside) -> None:
    with _gzip(name, "wb", compresslevel=2) as stream:
        stream.writelines(_parts(job, base, rank, index, aside))


def _parts(job: Job, base: int, rank: int, index: int, aside: PutAside) -> Iterator[bytes]:
    """The head on a line of its own, because HTA looks for the rank line by line; then the events."""
    told = aside.about.get("distributedInfo")
    known = {"world_size": job.world_size} if job.world_size else {}
    about = {"rank": rank} | (told if isinstance(told, dict) else {}) | {"rank": rank} | known
    head: dict[str, Any] = {"schemaVersion": 1, "distributedInfo": about, "baseTimeNanoseconds": base, "displayTimeUnit": "ms"}
    yield json.dumps(aside.about | head).replace("<", "\\u003c").encode()[:-1] + b',\n"traceEvents":[\n'
    with pa.memory_map(aside.path) as source:
        file = pa.ipc.open_file(source)
        for number in range(file.num_record_batches):
            yield from _events(file.get_batch(number), job, index, base)
    yield b'{"ph":"M","pid":0,"tid":0,"name":"tracekit"}\n]}\n'


def _events(batch: Any, job: Job, index: int, base: int) -> Iterator[bytes]:
    start = job.aligned(index, batch["ts"].to_numpy()) - base
    pieces: Sequence[Any] = (batch["before"], chrome.microseconds(start), ',"dur":', chrome.microseconds(batch["dur"].to_numpy()))
    yield from chrome.lines(*pieces, batch["behind"])
