"""CUDA memory snapshots (``torch.cuda.memory._dump_snapshot``, old and new) as tables.

Every age of the format is read: a bare list of segments (``memory_snapshot()``), blocks with a ``history`` instead of frames, entries
without address, pools or annotations, keys that do not exist yet.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from tracekit.memory.blocks import MOST_BYTES
from tracekit.memory.snapshot import ACTIONS, OOM, DeviceHistory, Entries, Ranges, Segments, Snapshot, Stacks, State
from tracekit.readers.memory_snapshot_process import Columns, read_columns
from tracekit.readers.sources import Source, clean
from tracekit.trace.events import BoolArray, Int64Array
from tracekit.units import NS_PER_US, NULL, format_bytes, listed, plural

#: Device numbers beyond this are no devices.
_MOST_DEVICES = 1 << 10
_LAST_YEAR_US = 4_102_444_800_000_000  # 2100


def read_snapshot(source: Source, progress: Callable[[int], None] | None = None, memory: int | None = None) -> Snapshot:
    """The snapshot in a file, plain or packed. ``memory`` [bytes]: the most that reading may take.

    Raises InputError, one line, for what cannot be read or is something else.
    """
    columns = read_columns(source, progress, memory)
    problems: list[str] = []
    entries, timed = _entries(columns, problems)
    segments, states = _segments(columns)
    devices = []
    for index in sorted({*entries, *segments}):
        none = np.empty(0, np.int64)
        chosen, ends = segments.get(index, none), states.get(index, none)
        history = entries[index] if index in entries else _history(columns, none, none)
        devices.append(DeviceHistory(index, history, _segments_of(columns, chosen), _state_of(columns, ends)))
    overflow = _overflow(columns)
    if not any(len(device.entries) for device in devices):
        why = "the history was not recorded (torch.cuda.memory._record_memory_history() was not called)"
        if problems:
            why = "nothing of the history could be used"
        if columns.left_out_traces:
            why = "there is no history in the snapshot (it was dumped with include_traces=False)"
        problems.append(f"{why}: only the state at the end is known, the peak is not")
    problems += [*_contradictions(devices), *overflow]
    if not timed:
        problems.append("the history has no times (torch before 2.3): its axis counts entries")
    return Snapshot(
        clean(source.name),
        devices,
        _stacks(columns),
        _ranges(columns),
        columns.pools,
        problems,
        timed,
        columns.settings,
        len(overflow) > 0,
    )


def _overflow(columns: Columns) -> list[str]:
    """A sentence where the ring buffer of the history was full and older entries were overwritten."""
    overflowed, most = (columns.settings.get(f"trace_alloc_{name}") for name in ("overflowed", "max_entries"))
    devices = [i for i, value in enumerate(overflowed if isinstance(overflowed, list) else [overflowed]) if value is True]
    if not devices:
        return []
    counts = most if isinstance(most, list) else [most]
    sizes = [size for size in (counts[min(i, len(counts) - 1)] for i in devices) if isinstance(size, int)]
    ring = f" (ring buffer of {max(sizes):,} entries)" if sizes else ""
    of = f" of device {listed(devices)}" if devices != [0] else ""
    return [
        f"older history{of} was overwritten{ring}: the peak is only that of the history kept, at least; "
        "record with a larger max_entries, or dump earlier"
    ]


def _stacks(columns: Columns) -> Stacks:
    start = np.concatenate([[0], np.cumsum(columns.numbers("stack.length"))]).astype(np.int64)
    frames = columns.numbers("frames").reshape(-1, 3).astype(np.int32)
    return Stacks(start, columns.codes("stack.frames"), frames, columns.strings)


def _is(columns: Columns, name: str, wanted: Callable[[str], bool]) -> BoolArray:
    """Which texts of a column are wanted; a missing one is not."""
    codes = columns.codes(name)
    answers = np.array([wanted(text) for text in columns.strings] + [False], np.bool_)
    return np.asarray(answers[codes], np.bool_)


def _entries(columns: Columns, problems: list[str]) -> tuple[dict[int, Entries], bool]:
    """(history of each device that has one, whether all have times). Entries that cannot be true are left out, with a sentence."""
    device, time = columns.numbers("entry.device"), columns.numbers("entry.time_us")
    numbers = np.array([ACTIONS.get(text, 0) for text in columns.strings] + [0], np.int8)
    action = numbers[columns.codes("entry.action")]
    timed = True
    found = {}
    for index in np.unique(device).tolist():
        rows = np.flatnonzero(device == index)
        when = time[rows]
        if (when == NULL).all():
            timed, when = False, np.arange(len(rows), dtype=np.int64) + 1
        size = columns.numbers("entry.size")[rows]
        good = (size >= 0) & (size < MOST_BYTES) & (when > 0) & (when < _LAST_YEAR_US)
        left = int((~good & (action[rows] > 0)).sum())
        if left:
            which = f"{plural(left, 'entry', 'entries')} of the history {'has' if left == 1 else 'have'}"
            problems.append(f"{which} no size or time that can be true: left out")
        found[index] = _history(columns, rows[good], when[good], action)
    return found, timed


def _history(columns: Columns, rows: Int64Array, time: Int64Array, action: np.ndarray | None = None) -> Entries:
    kind = np.zeros(0, np.int8) if action is None else action[rows]
    oom = kind == OOM
    return Entries(
        kind,
        np.where(oom, NULL, columns.numbers("entry.addr")[rows]),
        columns.numbers("entry.size")[rows],
        np.where(oom, columns.numbers("entry.device_free")[rows], NULL),
        time * NS_PER_US,
        columns.codes("entry.stack")[rows],
        columns.codes("entry.user_metadata")[rows],
        columns.codes("entry.pool_id")[rows],
    )


def _segments(columns: Columns) -> tuple[dict[int, Int64Array], dict[int, Int64Array]]:
    """Rows of the segments of each device, and of their blocks; segments whose size or device cannot be true are left out."""
    size, device = columns.numbers("segment.total_size"), columns.numbers("segment.device")
    good = (size >= 0) & (size < MOST_BYTES) & (device >= 0) & (device < _MOST_DEVICES)
    owner = _segment_of_block(columns)
    segments = {int(index): np.flatnonzero(good & (device == index)) for index in np.unique(device[good])}
    return segments, {index: np.flatnonzero(np.isin(owner, rows)) for index, rows in segments.items()}


def _segment_of_block(columns: Columns) -> Int64Array:
    count = columns.numbers("segment.blocks")
    return np.repeat(np.arange(len(count)), count)


def _segments_of(columns: Columns, rows: Int64Array) -> Segments:
    names = ("segment.address", "segment.total_size", "segment.claimed")
    address, size, claimed = (columns.numbers(name)[rows] for name in names)
    return Segments(address, size, columns.codes("segment.pool")[rows], claimed)


def _state_of(columns: Columns, rows: Int64Array) -> State:
    extent = np.clip(columns.numbers("block.size"), 0, MOST_BYTES)
    address = columns.numbers("block.address")
    address = np.where(address == NULL, _laid_out(columns, extent), address)
    used = _is(columns, "block.state", lambda text: text == "active_allocated")
    active = _is(columns, "block.state", lambda text: text.startswith("active"))
    requested, stack = columns.numbers("block.requested_size"), columns.codes("block.stack")
    return State(address[rows], extent[rows], requested[rows], used[rows], active[rows], stack[rows])


def _laid_out(columns: Columns, extent: Int64Array) -> Int64Array:
    """Addresses of blocks that older versions do not write: one behind the other from the beginning of their segment."""
    if not len(extent):
        return extent
    owner = _segment_of_block(columns)
    before = np.cumsum(extent) - extent
    first = np.searchsorted(owner, owner)
    return np.asarray(columns.numbers("segment.address")[owner] + before - before[first], np.int64)


def _contradictions(devices: list[DeviceHistory]) -> list[str]:
    found = []
    for device in devices:
        known = device.segments.claimed != NULL
        claimed, held = int(device.segments.claimed[known].sum()), int(device.state.size[device.state.active].sum())
        if known.all() and claimed != held:
            found.append(
                f"it contradicts itself: segments of device {device.index} claim {format_bytes(claimed)} in use ({claimed:,} bytes), "
                f"their blocks hold {format_bytes(held)} ({held:,}); the blocks are used"
            )
    return found


def _ranges(columns: Columns) -> Ranges:
    """Annotations from their START and END marks: an END closes the latest open START of its name."""
    rows: list[tuple[int, int, int]] = []
    open_: dict[int, list[int]] = {}
    last = 0
    starts = _is(columns, "annotation.stage", lambda text: re.fullmatch("start", text, re.IGNORECASE) is not None)
    times, names = columns.numbers("annotation.time_us"), columns.codes("annotation.name")
    for name, time, begins in zip(names.tolist(), times.tolist(), starts.tolist(), strict=True):
        if name < 0 or not 0 < time < _LAST_YEAR_US:
            continue
        last = max(last, time)
        if begins:
            open_.setdefault(name, []).append(time)
        elif open_.get(name):
            rows.append((open_[name].pop(), time, name))
    rows += [(start, max(last, start), name) for name, starts_ in open_.items() for start in starts_]
    start, end, name_codes = (np.array([row[i] for row in sorted(rows)], np.int64) for i in range(3))
    return Ranges(start * NS_PER_US, end * NS_PER_US, name_codes.astype(np.int32))
