"""CUDA memory snapshots (``torch.cuda.memory._dump_snapshot``, old and new) as columns.

Every age of the format is read: a bare list of segments (``memory_snapshot()``), blocks with a ``history`` instead of frames, entries
without address, pools or annotations, keys that do not exist yet.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing

import numpy as np

from tracekit.errors import InputError
from tracekit.memory.blocks import MOST_BYTES
from tracekit.memory.snapshot import ACTIONS, OOM, DeviceHistory, Entries, Ranges, Segments, Snapshot, Stacks, State
from tracekit.readers import memory_snapshot_store as s
from tracekit.readers.compressed import TextStream
from tracekit.readers.memory_snapshot_pickle import read_pickle
from tracekit.readers.memory_snapshot_store import Reading
from tracekit.readers.recognise import read_errors, reason
from tracekit.readers.sources import Source, clean
from tracekit.trace.events import Int64Array
from tracekit.units import NS_PER_US, NULL, format_bytes

_REMEDY = "give the file that torch.cuda.memory._dump_snapshot() wrote"
_KEYS = ("segments", "device_traces")
#: Device numbers beyond this are no devices.
_MOST_DEVICES = 1 << 10
_LAST_YEAR_US = 4_102_444_800_000_000  # 2100


def read_snapshot(source: Source, progress: Callable[[int], None] | None = None) -> Snapshot:
    """The snapshot in a file, plain or packed. Raises InputError, one line, for what cannot be read or is something else."""
    name = clean(source.name)
    try:
        with source.open() as raw, closing(TextStream(raw, progress)) as stream:
            reading = read_pickle(stream, name)
    except read_errors() as error:
        raise InputError(f"{name}: cannot be read ({reason(error)})", "check the file and its permissions") from error
    top = reading.entries(reading.root)
    if not any(key in top for key in _KEYS):
        if reading.kind(reading.root) != s.LIST or not _is_segment(reading, reading.items(reading.root)):
            raise InputError(f"{name} is a pickle, but not of a memory snapshot (it has no segments and no device_traces)", _REMEDY)
        top = {"segments": reading.root}
    return _Extraction(reading, top).snapshot(name)


def _is_segment(reading: Reading, words: Int64Array) -> bool:
    return len(words) > 0 and "blocks" in reading.entries(int(words[0]))


class _Extraction:
    """Takes the columns of a snapshot out of what its pickle held."""

    def __init__(self, reading: Reading, top: dict[str, int]) -> None:
        self._r = reading
        self._top = top
        self.problems: list[str] = []
        self._pools = [(int(a), int(b)) for a, b in reading.pairs.tolist()]
        self._timed = True

    def snapshot(self, name: str) -> Snapshot:
        r = self._r
        segments = self._segments()
        traces = [r.records(int(word)) for word in r.items(self._top["device_traces"])] if "device_traces" in self._top else []
        indices = sorted({*segments, *(index for index, rows in enumerate(traces) if len(rows))})
        devices = []
        for index in indices:
            rows = traces[index] if index < len(traces) else np.empty(0, np.int64)
            devices.append(DeviceHistory(index, self._entries(rows), *segments.get(index, self._no_segments())))
        if not any(len(device.entries) for device in devices):
            self.problems.append(
                "the history was not recorded (torch.cuda.memory._record_memory_history() was not called): "
                "only the state at the end is known, the peak is not"
            )
        self._check(devices)
        stacks = Stacks(r.nodes, r.frames, r.strings)
        if not self._timed:
            self.problems.append("the history has no times (torch before 2.3): its axis counts entries")
        return Snapshot(name, devices, stacks, self._ranges(), self._pools, self.problems, self._timed)

    def _entries(self, rows: Int64Array) -> Entries:
        numbers, codes = self._r.numbers[rows], self._r.codes[rows]
        action = np.array([ACTIONS.get(text, 0) for text in self._r.strings], np.int8)[np.maximum(codes[:, s.WORD], 0)]
        time, size, place = numbers[:, s.WHEN], numbers[:, s.AMOUNT], numbers[:, s.PLACE]
        if len(rows) and (time == NULL).all():
            self._timed = False
            time = np.arange(len(rows), dtype=np.int64) + 1
        good = (size >= 0) & (size < MOST_BYTES) & (time > 0) & (time < _LAST_YEAR_US)
        left = int((~good & (action > 0)).sum())
        if left:
            self.problems.append(f"{left} entries of the history have no size or time that can be true: they are left out")
        oom = (action == OOM)[good]
        place = place[good]
        return Entries(
            action[good],
            np.where(oom, NULL, place),
            size[good],
            np.where(oom, place, NULL),
            time[good] * NS_PER_US,
            codes[good, s.STACK_OF],
            codes[good, s.METADATA],
            codes[good, s.POOL],
        )

    def _segments(self) -> dict[int, tuple[Segments, State]]:
        r = self._r
        found: dict[int, list[tuple[int, int, int, int, Int64Array]]] = {}
        for word in r.items(self._top["segments"]).tolist() if "segments" in self._top else []:
            part = r.entries(word)
            size = r.number(part.get("total_size"), -1)
            index = r.number(part.get("device"), 0)
            if not 0 <= size < MOST_BYTES or not 0 <= index < _MOST_DEVICES:
                continue
            claimed = r.number(part.get("active_size", part.get("allocated_size")))
            blocks = r.records(part["blocks"]) if "blocks" in part else np.empty(0, np.int64)
            address = r.number(part.get("address"))
            found.setdefault(index, []).append((address, size, self._pool(part.get("segment_pool_id")), claimed, blocks))
        return {index: self._device(rows) for index, rows in found.items()}

    def _pool(self, word: int | None) -> int:
        r = self._r
        if word is None:
            return -1
        if r.kind(word) == s.PAIR:
            return r.pair(word)
        pair = [r.number(int(item)) for item in r.items(word)]
        if len(pair) != 2 or NULL in pair:
            return -1
        if (pair[0], pair[1]) not in self._pools:
            self._pools.append((pair[0], pair[1]))
        return self._pools.index((pair[0], pair[1]))

    def _device(self, rows: list[tuple[int, int, int, int, Int64Array]]) -> tuple[Segments, State]:
        address, size, pool, claimed = (np.array([row[i] for row in rows], np.int64) for i in range(4))
        order = np.concatenate([row[4] for row in rows])
        owner = np.repeat(np.arange(len(rows)), [len(row[4]) for row in rows])
        numbers, codes = self._r.numbers[order], self._r.codes[order]
        extent = np.clip(numbers[:, s.AMOUNT], 0, MOST_BYTES)
        place = np.where(numbers[:, s.PLACE] == NULL, self._laid_out(address, owner, extent), numbers[:, s.PLACE])
        used = np.array([text == "active_allocated" for text in self._r.strings], np.bool_)[np.maximum(codes[:, s.WORD], 0)]
        active = np.array([text.startswith("active") for text in self._r.strings], np.bool_)[np.maximum(codes[:, s.WORD], 0)]
        segments = Segments(address, size, pool.astype(np.int32), claimed)
        return segments, State(place, extent, numbers[:, s.WHEN], used, active, codes[:, s.STACK_OF])

    def _laid_out(self, address: Int64Array, owner: Int64Array, extent: Int64Array) -> Int64Array:
        """Addresses of blocks that older versions do not write: one behind the other from the beginning of their segment."""
        before = np.concatenate([[0], np.cumsum(extent)[:-1]]) if len(extent) else extent
        first = np.searchsorted(owner, owner)
        return np.asarray(address[owner] + before - before[first] if len(extent) else extent, np.int64)

    def _no_segments(self) -> tuple[Segments, State]:
        none, codes, no = np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.bool_)
        return Segments(none, none, codes, none), State(none, none, none, no, no, codes)

    def _check(self, devices: list[DeviceHistory]) -> None:
        for device in devices:
            known = device.segments.claimed != NULL
            claimed, held = int(device.segments.claimed[known].sum()), int(device.state.size[device.state.active].sum())
            if known.all() and claimed != held:
                self.problems.append(
                    f"it contradicts itself: segments of device {device.index} claim {format_bytes(claimed)} in use ({claimed:,} bytes), "
                    f"their blocks hold {format_bytes(held)} ({held:,}); the blocks are used"
                )

    def _ranges(self) -> Ranges:
        """Annotations from their START and END marks: an END closes the latest open START of its name."""
        r = self._r
        rows: list[tuple[int, int, int]] = []
        open_: dict[int, list[int]] = {}
        last = 0
        for word in r.items(self._top["external_annotations"]).tolist() if "external_annotations" in self._top else []:
            part = r.entries(word)
            name, time, stage = part.get("name"), r.number(part.get("time_us"), -1), r.text(part.get("stage"))
            if name is None or name & 15 != s.TEXT or not 0 < time < _LAST_YEAR_US:
                continue
            last = max(last, time)
            if re.fullmatch("start", stage, re.IGNORECASE):
                open_.setdefault(name >> 4, []).append(time)
            elif open_.get(name >> 4):
                rows.append((open_[name >> 4].pop(), time, name >> 4))
        rows += [(start, max(last, start), name) for name, starts in open_.items() for start in starts]
        start, end, names = (np.array([row[i] for row in sorted(rows)], np.int64) for i in range(3))
        return Ranges(start * NS_PER_US, end * NS_PER_US, names.astype(np.int32))
