"""Fuzz one kind of input, or all of them, for as long as you like.

    python -m tests.fuzz.run trace -n 100000 --seed 7
    python -m tests.fuzz.run all -n 1000

An input that is a fault (another exception than a refusal, more than ten seconds, more than 1 GB) is kept in tests/fuzz/found/ under the
name of its target; the test runs all that stand there.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import random
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

from tests.fuzz.targets import EXPECTED, TARGETS

FOUND = Path(__file__).with_name("found")
MOST_SECONDS, MOST_BYTES = 10, 1 << 30
#: The first input may have to wait for the reader to be compiled.
WARM_UP_SECONDS = 300


class TooLongError(BaseException):
    """An input that is not done in time."""


def attempt(name: str, data: bytes, folder: Path, seconds: int = MOST_SECONDS) -> str:
    """What is wrong with how a target takes an input; '' for nothing."""
    before = signal.signal(signal.SIGALRM, _expire)
    signal.alarm(seconds)
    try:
        with _bounded():
            TARGETS[name].run(data, folder)
    except EXPECTED as error:
        return "" if "\n" not in str(error) else f"a message of several lines: {error}"
    except (Exception, TooLongError):  # noqa: BLE001 - this is what is looked for
        return traceback.format_exc()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return ""


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    """No more memory than MOST_BYTES beside what is in use: an input that asks for all of it fails, instead of all that runs here."""
    status = Path("/proc/self/status")
    if not status.exists():
        yield
        return
    used = next(int(line.split()[1]) << 10 for line in status.read_text().splitlines() if line.startswith("VmData"))
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = used + MOST_BYTES if hard == resource.RLIM_INFINITY else min(used + MOST_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _expire(*_: object) -> None:
    raise TooLongError("it took too long")


def fuzz(name: str, count: int, seed: int) -> list[tuple[bytes, str]]:
    """(input, what is wrong) of the faults among ``count`` inputs."""
    chance, faults = random.Random(f"{name} {seed}"), []
    before = _peak()
    with tempfile.TemporaryDirectory() as scratch:
        attempt(name, TARGETS[name].make(chance), Path(scratch), WARM_UP_SECONDS)
        for _ in range(count):
            data = TARGETS[name].make(chance)
            problem = attempt(name, data, Path(scratch))
            if problem:
                faults.append((data, problem))
    used = _peak() - before  # tests that ran before in this process are none of it
    return faults if used < MOST_BYTES else [*faults, (b"", f"{used:,} bytes of memory were used")]


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Fuzz, keep what was found, and say it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("target", choices=[*TARGETS, "all"])
    parser.add_argument("-n", type=int, default=1000, help="inputs of each target")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    bad = 0
    for name in TARGETS if options.target == "all" else [options.target]:
        faults = fuzz(name, options.n, options.seed)
        bad += len(faults)
        FOUND.mkdir(exist_ok=True)
        for data, problem in faults:
            path = FOUND / f"{name}-{hashlib.sha256(data).hexdigest()[:12]}"
            path.write_bytes(data)
            print(f"{path}\n{problem}")
        print(f"{name}: {options.n} inputs, {len(faults)} faults", flush=True)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
