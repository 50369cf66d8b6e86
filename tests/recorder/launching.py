"""Run a script as a job of several ranks on this machine, without torchrun's processes."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

JOBS = Path(__file__).parent / "jobs"


def free_port() -> int:
    """One that nobody listens on, below those of outgoing connections: another job's could take it before ours does."""
    for port in random.SystemRandom().sample(range(15_000, 30_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port")


def start(script: Path, *arguments: str, ranks: int = 2, environment: Mapping[str, str] | None = None) -> list[subprocess.Popen]:
    """The ranks' processes, running."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    shared = {**os.environ, **shared, **(environment or {})}
    return [
        subprocess.Popen(
            [sys.executable, str(script), *arguments],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]


def run_job(script: Path, *arguments: str, ranks: int = 2, environment: Mapping[str, str] | None = None) -> str:
    """What all ranks printed, once all have ended well."""
    processes = start(script, *arguments, ranks=ranks, environment=environment)
    try:
        told = [process.communicate(timeout=280)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    assert codes == [0] * ranks, f"exit codes {codes}\n" + "\n".join(text[-1500:] for text in told)
    return "\n".join(told)
