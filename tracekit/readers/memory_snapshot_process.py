"""The pickle of a memory snapshot to columns, in a process of its own with a memory and a time limit.

The file is hostile until shown otherwise: the child refuses whatever is more than plain values, and where it is made to use up its memory,
its time or its stack, only the child ends.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np
import numpy.typing as npt

from tracekit.errors import InputError
from tracekit.executors.memory import machine_memory
from tracekit.readers.compressed import TextStream
from tracekit.readers.recognise import read_errors, reason
from tracekit.readers.sources import Source, clean
from tracekit.trace.events import Int32Array, Int64Array
from tracekit.units import format_bytes

#: What the child may take of CPU time: so many seconds, and some more a megabyte of the file.
SECONDS, SECONDS_PER_MB = 60, 2
_CHUNK = 1 << 20
#: Where this package lies: the child looks nowhere else but in the standard library.
_ROOT = Path(__file__).resolve().parents[2]
_CHILD = "import sys; sys.path.append(sys.argv.pop(1)); from tracekit.readers.memory_snapshot_child import main; main()"
_REMEDY = "give the file that torch.cuda.memory._dump_snapshot() wrote"


@dataclass(frozen=True)
class Columns:
    """What a snapshot holds: columns by name (see memory_snapshot_child), strings and pools by code."""

    arrays: dict[str, npt.NDArray[Any]]
    strings: list[str]
    pools: list[tuple[int, int]]
    settings: dict[str, Any]
    left_out_traces: bool

    def numbers(self, name: str) -> Int64Array:
        """A column of numbers, NULL where there is none."""
        return self.arrays[name]

    def codes(self, name: str) -> Int32Array:
        """A column of codes, -1 where there is none."""
        return self.arrays[name]


def read_columns(source: Source, progress: Callable[[int], None] | None = None, memory: int | None = None) -> Columns:
    """The columns of a snapshot file, plain or packed. ``memory`` [bytes]: the limit; by default what the machine has.

    Raises InputError, one line, for what cannot be read, is no snapshot, wants more than plain values or takes too long; MemoryError, one
    line as well, for what needs more than the limit.
    """
    name = clean(source.name)
    most = machine_memory() if memory is None else memory
    seconds = SECONDS + SECONDS_PER_MB * source.size // 1_000_000
    command = [sys.executable, "-I", "-S", "-c", _CHILD, str(_ROOT), str(most), str(seconds)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            _feed(source, name, child.stdin, progress)
            answer = child.stdout.read()
        except BaseException:
            child.kill()
            raise
    if len(answer) < 8:
        _raise_ended(name, child.returncode, most, seconds)
    size = 8 + int.from_bytes(answer[:8], "little")
    header = json.loads(answer[8:size])
    if "problem" in header:
        _raise_problem(name, header, most)
    return _unpacked(header, answer, size)


def _feed(source: Source, name: str, target: IO[bytes], progress: Callable[[int], None] | None) -> None:
    """The unpacked file into the child, until it wants no more."""
    block = bytearray(_CHUNK)
    try:
        with source.open() as raw, closing(TextStream(raw, progress)) as stream:
            first = True
            while count := stream.fill(memoryview(block)):
                if first and block.startswith(b"PK"):
                    raise InputError(f"{name} is a zip archive (torch.save writes them), not a memory snapshot", _REMEDY)
                first = False
                target.write(memoryview(block)[:count])
        target.close()
    except BrokenPipeError:
        with contextlib.suppress(BrokenPipeError):
            target.close()
    except read_errors() as error:
        raise InputError(f"{name}: cannot be read ({reason(error)})", "check the file and its permissions") from error


def _unpacked(header: dict[str, Any], answer: bytes, at: int) -> Columns:
    arrays: dict[str, npt.NDArray[Any]] = {}
    for column, kind, count in header["columns"]:
        arrays[column] = np.frombuffer(answer, {"q": np.int64, "i": np.int32}[kind], count, at)
        at += arrays[column].nbytes
    pools = [(int(one), int(two)) for one, two in header["pools"]]
    return Columns(arrays, header["strings"], pools, header["settings"], header["left_out_traces"])


def _raise_problem(name: str, header: dict[str, Any], most: int) -> NoReturn:
    problem = header["problem"]
    if problem == "refused":
        wanted = "".join(c if c.isprintable() else "?" for c in header["detail"])[:120]
        raise InputError(f"{name} was not opened: the pickle {wanted}, which a memory snapshot never does", _REMEDY)
    if problem == "memory":
        _raise_memory(name, most)
    if problem == "truncated":
        raise InputError(f"{name} is truncated: the pickle has no end", f"copy the file anew, or {_REMEDY}")
    if problem == "no snapshot":
        raise InputError(f"{name} is a pickle, but not of a memory snapshot (it has no segments and no device_traces)", _REMEDY)
    raise InputError(f"{name} is not a pickle of plain values, or a damaged one", _REMEDY)


def _raise_ended(name: str, code: int, most: int, seconds: int) -> NoReturn:
    """The child ended without a word."""
    if code == -getattr(signal, "SIGXCPU", 0) or code == -getattr(signal, "SIGKILL", 0):
        if code == -signal.SIGXCPU:
            raise InputError(f"{name} takes more than {seconds} s to read, which no memory snapshot of its size does", _REMEDY)
        _raise_memory(name, most)
    raise InputError(f"{name} is not a pickle of plain values, or a damaged one (its reader ended with code {code})", _REMEDY)


def _raise_memory(name: str, most: int) -> NoReturn:
    remedy = "raise --memory-limit, read it on a machine with more memory, or record fewer entries (max_entries)"
    raise MemoryError(f"{name} needs more than {format_bytes(most)} of memory to be read: {remedy}")
