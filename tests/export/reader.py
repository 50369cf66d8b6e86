"""A slow and obvious reader of merged traces, independent of what writes them: slices by track, flows bound to slices, counters."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path


@dataclass
class Slice:
    name: str
    start: int  # ns after the trace's zero
    dur: int
    args: dict


@dataclass
class Merged:
    """``tracks[process][thread]`` are slices in order of start; ``flows[id]`` the (process, thread, slice) that its ends are bound to."""

    tracks: dict[str, dict[str, list[Slice]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    flows: dict[tuple[str, str], list[tuple[str, str, Slice]]] = field(default_factory=lambda: defaultdict(list))
    counters: dict[tuple[str, str, str], list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))
    instants: list[tuple[str, str, dict]] = field(default_factory=list)
    base: int = 0
    other: dict = field(default_factory=dict)


def ns(text) -> int:
    value = Decimal(text) * 1000
    assert value == int(value), text
    return int(value)


def read(path: Path) -> Merged:
    raw = path.read_bytes()
    document = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw, parse_float=str)
    events = document["traceEvents"]
    named = {"process_name": {}, "thread_name": {}}
    for event in events:
        if event["ph"] == "M" and event["name"] in named:
            named[event["name"]][event["pid"], event["tid"] if event["name"] == "thread_name" else 0] = event["args"]["name"]

    def track(event) -> tuple[str, str]:
        return named["process_name"][event["pid"], 0], named["thread_name"][event["pid"], event["tid"]]

    found = Merged(base=int(document["otherData"]["base_unix_ns"]), other=document["otherData"])
    for event in events:
        if event["ph"] == "X":
            process, thread = track(event)
            found.tracks[process][thread].append(Slice(event["name"], ns(event["ts"]), ns(event["dur"]), event.get("args", {})))
        elif event["ph"] == "C":
            for key, value in event["args"].items():
                process = named["process_name"][event["pid"], 0]
                found.counters[process, event["name"], key].append((ns(event["ts"]), float(value)))
        elif event["ph"] == "i":
            found.instants.append((track(event)[1], event["name"], event["args"]))
    for threads in found.tracks.values():
        for slices in threads.values():
            slices.sort(key=lambda one: (one.start, -one.dur))
    for event in sorted((e for e in events if e["ph"] in "stf"), key=lambda e: (str(e["id"]), ns(e["ts"]), "stf".index(e["ph"]))):
        process, thread = track(event)
        at = ns(event["ts"])
        around = [one for one in found.tracks[process][thread] if one.start <= at and (at < one.start + one.dur or at == one.start)]
        assert around, f"a flow ends beside every slice of {process}, {thread}: {event}"
        found.flows[event["cat"], str(event["id"])].append((process, thread, around[-1]))
    return found


def check_nesting(merged: Merged) -> None:
    """Within a track every slice lies within the one that is open when it begins."""
    for process, threads in merged.tracks.items():
        for thread, slices in threads.items():
            open_ends: list[int] = []
            for one in slices:
                while open_ends and open_ends[-1] <= one.start:
                    open_ends.pop()
                assert not open_ends or one.start + one.dur <= open_ends[-1], (process, thread, one)
                open_ends.append(one.start + one.dur)
