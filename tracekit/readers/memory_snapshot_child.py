"""The part of the snapshot reader that touches the pickle: ``main`` is run alone, in a process with limits.

    memory_snapshot_child MEMORY_BYTES CPU_SECONDS < PICKLE > COLUMNS

The standard library's unpickler builds plain values; whatever would import, call or fetch anything is refused. Columns come out of them,
without an object a value: see ``write``. Only the standard library is imported, so the process starts in some 20 ms.
"""

from __future__ import annotations

import gc
import io
import json
import os
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, BinaryIO

from tracekit.readers.plain_pickle import DAMAGED, PlainUnpickler, RefusedError

NULL = -(2**63)
_KEYS = ("segments", "device_traces")
_MOST_SETTINGS = 64


class _Input(io.BufferedReader):
    """Standard input. A length that no text follows ends the text, instead of asking for so much memory."""

    def read(self, size: int | None = -1, /) -> bytes:
        """At most ``size`` bytes."""
        if size is None or size < 1 << 20:
            return super().read(size)
        found = bytearray()
        while len(found) < size and (more := super().read(min(size - len(found), 1 << 20))):
            found += more
        return bytes(found)


class Columns:
    """What a snapshot holds, as columns; strings, frames, stacks and pools are kept once and stand as codes."""

    def __init__(self, root: Any) -> None:
        self.arrays: dict[str, array[int]] = {}
        self.strings: dict[str, int] = {"": 0}
        self.pools: dict[tuple[int, int], int] = {}
        self._frames: dict[tuple[int, int, int], int] = {}
        self._frame_of: dict[int, int] = {}  # by identity: everything that was read stays alive
        self._stacks: dict[tuple[int, ...], int] = {(): 0}
        self._stack_of: dict[tuple[int, ...], int] = {(): 0}
        if type(root) is list and root and type(root[0]) is dict and "blocks" in root[0]:
            root = {"segments": root}
        self.is_snapshot = type(root) is dict and any(key in root for key in _KEYS)
        top: dict[Any, Any] = root if self.is_snapshot else {}
        self._segments([part for part in _items(top.get("segments")) if type(part) is dict])
        self._history(_items(top.get("device_traces")))
        self._annotations([part for part in _items(top.get("external_annotations")) if type(part) is dict])
        self.settings = _settings(top.get("allocator_settings"))
        self.left_out_traces = "allocator_settings" in top and not _items(top.get("device_traces"))
        self.arrays["frames"] = array("q", (number for frame in self._frames for number in frame))
        self.arrays["stack.length"] = array("q", map(len, self._stacks))
        self.arrays["stack.frames"] = array("i", (frame for stack in self._stacks for frame in stack))

    def _history(self, traces: Sequence[Any]) -> None:
        for name in ("entry.device", "entry.addr", "entry.size", "entry.time_us", "entry.device_free", "entry.stream"):
            self.arrays[name] = array("q")
        for name in ("entry.action", "entry.stack", "entry.user_metadata", "entry.pool_id"):
            self.arrays[name] = array("i")
        for device, trace in enumerate(traces):
            rows = [row for row in _items(trace) if type(row) is dict and "action" in row]
            self.arrays["entry.device"].extend(array("q", [device]) * len(rows))
            for key in ("addr", "size", "time_us", "device_free", "stream"):
                self.arrays[f"entry.{key}"].extend(_numbers([row.get(key, NULL) for row in rows]))
            for key in ("action", "user_metadata"):
                self.arrays[f"entry.{key}"].extend(self._texts([row.get(key) for row in rows]))
            self.arrays["entry.stack"].extend(self._stack_codes([row.get("frames") for row in rows]))
            self.arrays["entry.pool_id"].extend(self._pool_codes([row.get("pool_id") for row in rows]))

    def _segments(self, parts: list[dict[Any, Any]]) -> None:
        self.arrays["segment.device"] = _numbers([part.get("device", 0) for part in parts])
        self.arrays["segment.claimed"] = _numbers([part.get("active_size", part.get("allocated_size", NULL)) for part in parts])
        for key in ("address", "total_size", "stream"):
            self.arrays[f"segment.{key}"] = _numbers([part.get(key, NULL) for part in parts])
        self.arrays["segment.pool"] = self._pool_codes([part.get("segment_pool_id") for part in parts])
        inside = [[row for row in _items(part.get("blocks")) if type(row) is dict and "state" in row] for part in parts]
        self.arrays["segment.blocks"] = array("q", map(len, inside))
        blocks = [row for rows in inside for row in rows]
        for key in ("address", "size", "requested_size"):
            self.arrays[f"block.{key}"] = _numbers([row.get(key, NULL) for row in blocks])
        self.arrays["block.state"] = self._texts([row.get("state") for row in blocks])
        self.arrays["block.stack"] = self._stack_codes([_frames_of_block(row) for row in blocks])

    def _annotations(self, parts: list[dict[Any, Any]]) -> None:
        self.arrays["annotation.time_us"] = _numbers([part.get("time_us", NULL) for part in parts])
        for key in ("name", "stage"):
            self.arrays[f"annotation.{key}"] = self._texts([part.get(key) for part in parts])

    def _texts(self, values: list[Any]) -> array[int]:
        """Code of each text; -1 for what is none."""
        try:
            distinct = set(values)
        except TypeError:  # a list or dict in place of a text
            values = [value if type(value) is str else None for value in values]
            distinct = set(values)
        codes = {value: self._text(value) if type(value) is str else -1 for value in distinct}
        return array("i", [codes[value] for value in values])

    def _text(self, value: Any) -> int:
        if type(value) is not str:
            return 0
        code = self.strings.get(value)
        return self.strings.setdefault(value, len(self.strings)) if code is None else code

    def _stack_codes(self, stacks: Iterable[Any]) -> array[int]:
        """Code of each list of frames; 0 is the empty one, -1 no list."""
        known, codes = self._stack_of, array("i")
        for frames in stacks:
            if type(frames) is not list and type(frames) is not tuple:
                codes.append(-1)
                continue
            key = tuple(map(id, frames))
            code = known.get(key)
            if code is None:
                stack = tuple([code for code in map(self._frame, frames) if code >= 0])
                code = known[key] = self._stacks.setdefault(stack, len(self._stacks))
            codes.append(code)
        return codes

    def _frame(self, frame: Any) -> int:
        code = self._frame_of.get(id(frame))
        if code is None:
            code = -1
            if type(frame) is dict and type(frame.get("filename")) is str:
                line = frame.get("line")
                line = min(max(line, -1), 2**31 - 1) if type(line) is int else 0
                key = (self._text(frame["filename"]), line, self._text(frame.get("name")))
                code = self._frames.setdefault(key, len(self._frames))
            self._frame_of[id(frame)] = code
        return code

    def _pool_codes(self, values: list[Any]) -> array[int]:
        """Code of each pair of numbers; -1 for anything else."""
        known: dict[int, int] = {}
        return array("i", [known[id(v)] if id(v) in known else known.setdefault(id(v), self._pool(v)) for v in values])

    def _pool(self, value: Any) -> int:
        pair = tuple(value) if type(value) is list or type(value) is tuple else ()
        if len(pair) != 2 or any(type(part) is not int or not NULL < part < -NULL for part in pair):
            return -1
        return self.pools.setdefault((pair[0], pair[1]), len(self.pools))


def _items(value: Any) -> Sequence[Any]:
    return value if type(value) is list or type(value) is tuple else ()


def _numbers(values: list[Any]) -> array[int]:
    """Integers; NULL in place of anything else, and of what no 64 bits hold."""
    try:
        return array("q", values)
    except (TypeError, OverflowError):
        return array("q", [value if type(value) is int and NULL <= value < -NULL else NULL for value in values])


def _frames_of_block(block: dict[Any, Any]) -> Any:
    """Of old blocks the newest entry of their history has them."""
    history = _items(block.get("history"))
    newest = history[-1] if history else None
    return newest["frames"] if "frames" not in block and type(newest) is dict and "frames" in newest else block.get("frames")


def _settings(value: Any) -> dict[str, Any]:
    """Plain settings of the allocator, and those by device or by size, clipped."""
    found: dict[str, Any] = {}
    for key, setting in list(value.items())[:_MOST_SETTINGS] if type(value) is dict else []:
        if type(key) is str:
            found[key[:100]] = _setting(setting) if type(setting) is not dict else {
                str(name)[:100]: _setting(part) for name, part in list(setting.items())[:_MOST_SETTINGS]
            }  # fmt: skip
    return found


def _setting(value: Any) -> Any:
    if type(value) is list or type(value) is tuple:
        return [_setting(part) if type(part) in (bool, int, float, str) else None for part in value[: 1 << 10]]
    return value[:1000] if type(value) is str else value if type(value) in (bool, int, float) else None


def limit(memory: int, seconds: int) -> None:
    """Never more than so much address space and CPU time; beyond the latter the system ends the process."""
    try:
        import resource
    except ImportError:  # Windows has none
        return
    for kind, wanted in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def _most_held() -> int:
    """The most bytes this process has held. Far below the limit, one number in the file asked for too much: such a file is damaged."""
    try:
        with open("/proc/self/status", encoding="ascii") as status:  # noqa: PTH123
            return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    except OSError:  # another system than Linux
        return sys.maxsize


def write(out: BinaryIO, header: dict[str, Any], arrays: Iterable[array[int]] = ()) -> None:
    """Length of the header (8 bytes), the header as JSON, the arrays one behind the other."""
    text = json.dumps(header).encode()
    out.write(struct.pack("<Q", len(text)) + text)
    for column in arrays:
        out.write(memoryview(column).cast("B"))
    out.flush()


def _read(out: BinaryIO) -> None:
    root = PlainUnpickler(_Input(io.FileIO(0, closefd=False), 1 << 20), encoding="utf-8", errors="replace").load()
    os.close(0)  # what follows the pickle is nobody's: who still writes it learns so
    columns = Columns(root)
    if not columns.is_snapshot:
        write(out, {"problem": "no snapshot"})
        return
    header = {
        "columns": [[name, column.typecode, len(column)] for name, column in columns.arrays.items()],
        "strings": [text.encode("utf-8", "replace").decode() for text in columns.strings],
        "pools": list(columns.pools),
        "settings": columns.settings,
        "left_out_traces": columns.left_out_traces,
    }
    write(out, header, columns.arrays.values())


def main() -> None:
    """Read, and write columns or the problem."""
    limit(int(sys.argv[1]), int(sys.argv[2]))
    gc.disable()  # nothing that is built here goes away
    out = open(1, "wb", closefd=False)  # noqa: SIM115
    try:
        _read(out)
    except RefusedError as refused:
        write(out, {"problem": "refused", "detail": str(refused)})
    except MemoryError:
        write(out, {"problem": "memory" if _most_held() > int(sys.argv[1]) // 4 else "damaged"})
    except EOFError:
        write(out, {"problem": "truncated"})
    except DAMAGED as error:
        write(out, {"problem": "truncated" if "truncated" in str(error) else "damaged"})
    os._exit(0)  # without taking all values apart


if __name__ == "__main__":
    main()
