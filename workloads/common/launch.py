"""Start the ranks of a workload on this machine, watch them, and say which one failed and why.

All ranks are forked from one server process that has torch loaded, so that eight ranks do not import it eight times. When a rank dies the
others get some time to notice (gloo tells them within a second) and to write what they have recorded; then they are stopped.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import multiprocessing
import os
import shlex
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from tracekit.errors import TracekitError, UsageError
from tracekit.recorder.folder import empty_folder

from .settings import mesh_sizes, parse

#: Seconds that the other ranks get after one has died.
GRACE_S = 20.0


#: Lines that torch's profiler and allocator print in every run.
_NOISE = ("USDT:", "Memory block of unknown size was allocated before the profiling started")


class RankError(TracekitError):
    """A rank of the workload failed."""

    exit_code = 1


@dataclass(frozen=True)
class Failure:
    """One rank that failed. ``order`` is when, ``text`` the last line of its error, ``log`` all that it printed."""

    rank: int
    order: float
    text: str
    log: str


def shown(arguments: Sequence[str]) -> str:
    """Arguments as one would type them."""
    return shlex.join(arguments)


def launch(name: str, arguments: Sequence[str], *, quiet: bool = False) -> int:
    """Run the workload module ``name`` with ``arguments`` on as many ranks as its mesh has; the number of ranks.

    Raises UsageError for arguments that make no sense, RankError where a rank failed. What rank 0, or the first that failed, printed
    goes to standard error.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tracekit.workloads.common.loop", name])
    with tempfile.TemporaryDirectory(prefix="tracekit-") as folder, _no_main():
        world = _plan(context, name, arguments, folder)
        where = f"tcp://127.0.0.1:{_free_port()}"
        processes = [
            context.Process(target=_rank, args=(name, list(arguments), rank, world, where, folder), name=f"rank {rank}")
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        _watch(processes)
        failures = _failures(processes, folder)
        if not quiet:
            _print_logs(folder, [failures[0].rank] if failures else [0])
        if failures:
            raise RankError(_sentence(failures, world), "what the other ranks had recorded by then was written")
    return world


@contextlib.contextmanager
def _no_main() -> Iterator[None]:
    """Children need nothing of the program that starts them, so they must not run its main module again."""
    main = sys.modules["__main__"]
    kept = {name: getattr(main, name) for name in ("__spec__", "__file__") if hasattr(main, name)}
    main.__spec__ = None
    if "__file__" in kept:
        del main.__file__
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(main, name, value)


def _plan(context: multiprocessing.context.ForkServerContext, name: str, arguments: Sequence[str], folder: str) -> int:
    """Let a child read the arguments (it has torch loaded, this process may not): how many ranks there are to be."""
    process = context.Process(target=_plan_in_child, args=(name, list(arguments), folder))
    process.start()
    process.join()
    told = Path(folder) / "plan.json"
    if not told.exists():
        raise SystemExit(process.exitcode or 0)  # --help
    plan = json.loads(told.read_text())
    if "error" in plan:
        raise UsageError(plan["error"])
    return int(plan["world"])


def _plan_in_child(name: str, arguments: list[str], folder: str) -> None:
    plan: dict[str, object]
    try:
        module = importlib.import_module(name)
        settings, _ = parse(module, arguments)
        world = math.prod(mesh_sizes(module, settings).values())
        if settings.output:
            empty_folder(Path(settings.output), replace=settings.replace)
        plan = {"world": 1 if settings.backend == "fake" else world}
    except TracekitError as error:
        plan = {"error": str(error)}
    (Path(folder) / "plan.json").write_text(json.dumps(plan))


def _rank(name: str, arguments: list[str], rank: int, world: int, where: str, folder: str) -> None:
    """One rank, in its own process: its output goes to a file, its error to another."""
    log = os.open(f"{folder}/rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        from .loop import run

        run(importlib.import_module(name), arguments, rank, world, where)
    except BaseException as error:  # noqa: BLE001 - whatever ended the rank is told by the launcher
        failure = {"order": time.time(), "text": _in_a_line(error)}
        if isinstance(error, UsageError):
            failure["usage"] = str(error)
        else:
            traceback.print_exc()
        Path(f"{folder}/rank{rank}.error").write_text(json.dumps(failure))
        sys.stderr.flush()
        os._exit(1)  # a process group that waits for the dead would keep this one from ending


def _in_a_line(error: BaseException) -> str:
    """What began it: the innermost cause, with its first line."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0].strip() if text else 'without a message'}"


def _watch(processes: Sequence[BaseProcess]) -> None:
    """Wait until all have ended; once one has failed, for the others only so long."""
    deadline = math.inf
    while any(process.is_alive() for process in processes):
        if deadline == math.inf and any(process.exitcode not in (None, 0) for process in processes):
            deadline = time.monotonic() + GRACE_S
        if time.monotonic() > deadline:
            for process in processes:
                if process.is_alive():
                    process.terminate()
            deadline = time.monotonic() + 5
            while any(p.is_alive() for p in processes) and time.monotonic() < deadline:
                time.sleep(0.05)
            for process in processes:
                if process.is_alive():
                    process.kill()
            return
        time.sleep(0.02)


def _failures(processes: Sequence[BaseProcess], folder: str) -> list[Failure]:
    """Who failed, the first first; UsageError where that is what it was."""
    result = []
    for rank, process in enumerate(processes):
        process.join()
        if process.exitcode == 0:
            continue
        path, log = Path(f"{folder}/rank{rank}.error"), Path(f"{folder}/rank{rank}.log")
        if path.exists():
            told = json.loads(path.read_text())
            if "usage" in told:
                raise UsageError(told["usage"])
            order, text = float(told["order"]), str(told["text"])
        else:  # it died without a word, so before those whom its death made fail
            order, text = 0.0, _died(process.exitcode)
            if process.exitcode == -signal.SIGTERM:
                order = math.inf
        result.append(Failure(rank, order, text, log.read_text(errors="replace") if log.exists() else ""))
    return sorted(result, key=lambda failure: (failure.order, failure.rank))


def _died(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        why = {"SIGKILL": " (killed, perhaps for memory)", "SIGSEGV": " (crashed)", "SIGTERM": " (stopped, it did not end by itself)"}
        return f"ended by {name}{why.get(name, '')}"
    return f"ended with exit code {code}"


def _sentence(failures: Sequence[Failure], world: int) -> str:
    first, others = failures[0], failures[1:]
    text = f"rank {first.rank} of {world} failed: {first.text}"
    if others:
        text += f" (after it {', '.join(f'rank {f.rank}' for f in others[:8])}{'...' if len(others) > 8 else ''})"
    return text


def _print_logs(folder: str, ranks: Sequence[int]) -> None:
    """What these ranks printed; without lines that say nothing about the job."""
    for rank in ranks:
        path = Path(f"{folder}/rank{rank}.log")
        text = path.read_text(errors="replace") if path.exists() else ""
        for line in text.splitlines():
            if not any(noise in line for noise in _NOISE):
                print(f"[rank {rank}] {line}", file=sys.stderr)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
