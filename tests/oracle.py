"""The slow, obvious reader: Python's json with decimal text, event by event. Tests hold the product's reader to it.

It reads strict JSON only and knows nothing of speed; columns are those of tracekit.trace.events.RankTables.
"""

from __future__ import annotations

import json
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import numpy as np

from tracekit.trace.events import CATEGORY_NAMES, SIDE_COLUMNS, Category, Coverage, Lane, RankTables, SideTable, side_dtype
from tracekit.units import NULL, NULL32


class _Pool:
    def __init__(self) -> None:
        self.codes: dict[str, int] = {"": 0}

    def code(self, text: str | None) -> int:
        return 0 if text is None else self.codes.setdefault(text, len(self.codes))


def _scaled(value: Any, digits: int) -> int:
    """A JSON number, or a number in a string, times 10**digits as an exact integer; NULL for anything else."""
    try:
        number = Decimal(str(value).strip()) * 10**digits
        whole = int(number.to_integral_value(ROUND_HALF_UP)) if number.is_finite() else NULL
        return whole if not digits or -(2**63) < whole < 2**63 else NULL
    except ArithmeticError:
        return NULL


def _integer(value: Any) -> int:
    number = _scaled(value, 0) if not isinstance(value, bool | type(None) | list | dict) else NULL
    if not -(2**63) <= number < 2**64:
        return NULL
    return number if number < 2**63 else number - 2**64


def category_of(event: dict[str, Any]) -> Category:
    if event.get("ph") == "M":
        return Category.METADATA
    if event.get("name") == "[memory]":
        return Category.MEMORY
    return CATEGORY_NAMES.get(event.get("cat", ""), Category.OTHER)


def _by_name(category: Category, name: str) -> Category:
    """What a device's command processor lists among its work: waits and marks are none, requests to the DMA engine are copies."""
    if category != Category.KERNEL:
        return category
    if name in ("event_wait", "event_record", "wait_event", "record_event", "stream_wait_event"):
        return Category.SYNC
    return Category.MEMCPY if name == "dma_request" else category


def _close_pairs(columns: dict[str, list[int]]) -> None:
    """Thread by thread in order of time: an event of ``ph`` E closes the latest B that is open, which is then a complete event."""
    opened: dict[int, list[int]] = {}
    for row in sorted(range(len(columns["ts"])), key=lambda row: (columns["ts"][row], row)):
        if columns["ts"][row] == NULL:
            continue
        stack = opened.setdefault(columns["lane"][row], [])
        if columns["phase"][row] == ord("B"):
            stack.append(row)
        elif columns["phase"][row] == ord("E") and stack:
            begin = stack.pop()
            columns["phase"][begin] = ord("X")
            columns["dur"][begin] = columns["ts"][row] - columns["ts"][begin]


def tables_from_document(document: dict[str, Any], file: str = "made.json") -> RankTables:
    """Tables of a document parsed by ``json.loads(text, parse_float=str)`` (or plain Python numbers)."""
    base = int(document.get("baseTimeNanoseconds", 0))
    pool = _Pool()
    lanes: dict[tuple[Any, Any], int] = {}
    names: dict[tuple[Any, Any, str], str] = {}
    columns: dict[str, list[int]] = {
        k: [] for k in ("ts", "dur", "name", "category", "phase", "lane", "correlation", "external_id", "stream", "device")
    }
    side: dict[str, dict[str, list[int]]] = {t: {c: [] for c in ["row", *cs]} for t, cs in SIDE_COLUMNS.items()}
    arrows = 0
    for event in document["traceEvents"]:
        if event.get("ph") in ("s", "t", "f"):
            arrows += 1
            continue
        args = event.get("args") or {}
        row = len(columns["ts"])
        ts = _scaled(event.get("ts"), 3)
        columns["ts"].append(NULL if ts == NULL else ts + base)
        columns["dur"].append(_scaled(event.get("dur"), 3))
        columns["name"].append(pool.code(event.get("name")))
        category = category_of(event)
        columns["category"].append(int(_by_name(category, event.get("name", ""))))
        columns["phase"].append(ord(event["ph"]) if len(event.get("ph", "")) == 1 else 0)
        columns["lane"].append(lanes.setdefault((_place(event.get("pid")), _place(event.get("tid"))), len(lanes)))
        columns["correlation"].append(_integer(args.get("correlation")))
        columns["external_id"].append(_integer(args.get("External id", args.get("external id"))))
        on_device = category in (Category.KERNEL, Category.MEMCPY, Category.MEMSET)
        for key, place in (("stream", _place(event.get("tid"))), ("device", _place(event.get("pid")))):
            number = _integer(args.get(key))
            if number == NULL and on_device and isinstance(place, int) and 0 <= place < (2**31 - 1 if key == "stream" else 1024):
                number = place  # device events lie on rows that are named after device and stream
            columns[key].append(NULL32 if not -(2**31) < number < 2**31 else number)
        if event.get("ph") == "M":
            names[_place(event.get("pid")), _place(event.get("tid")), event["name"]] = str(args.get("name", ""))
        for table, keys in SIDE_COLUMNS.items():
            if any(key in args for key in keys):
                side[table]["row"].append(row)
                for key, kind in keys.items():
                    side[table][key].append(_side_value(args, key, kind, pool))
    _close_pairs(columns)
    return RankTables(
        **{k: np.array(v, _COLUMN_DTYPES.get(k, np.int64)) for k, v in columns.items()},
        side={
            t: SideTable(np.array(cs["row"], np.int64), {c: np.array(cs[c], side_dtype(k)) for c, k in SIDE_COLUMNS[t].items()})
            for t, cs in side.items()
        },
        strings=list(pool.codes),
        lanes=[Lane(pid, tid, _process(names, pid, tid), names.get((pid, tid, "thread_name"), "")) for pid, tid in lanes],
        metadata={k: v for k, v in document.items() if k != "traceEvents"},
        coverage=Coverage(file, events=len(columns["ts"]), arrows=arrows),
    )


_COLUMN_DTYPES = {"name": np.int32, "category": np.int8, "phase": np.uint8, "lane": np.int32, "stream": np.int32, "device": np.int32}


def _side_value(args: dict[str, Any], key: str, kind: str, pool: _Pool) -> int:
    if key not in args:
        return 0 if kind in ("str", "json") else NULL
    value = args[key]
    if kind == "str":
        return pool.code(value if isinstance(value, str) else json.dumps(value))
    if kind == "json":
        return pool.code(json.dumps(value))
    return _scaled(value, 6) if kind == "micro" else _integer(value)


def tables(text: str) -> RankTables:
    """Tables of JSON text, every number exact."""
    return tables_from_document(json.loads(text, parse_float=str))


def _process(names: dict[tuple[Any, Any, str], str], pid: Any, tid: Any) -> str:
    """The process's name: of this lane, else the last that any lane of the process was given."""
    own = names.get((pid, tid, "process_name"))
    others = [text for (p, _, kind), text in names.items() if p == pid and kind == "process_name"]
    return own if own is not None else (others[-1] if others else "")


def _place(value: Any) -> Any:
    """A pid or tid: a number in quotes is a number."""
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value
