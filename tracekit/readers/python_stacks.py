"""Python stacks of a process: what faulthandler, an uncaught exception, or py-spy print. Innermost frame first, the main thread first."""

from __future__ import annotations

import re

from tracekit.errors import InputError
from tracekit.readers.hang_files import Frame, Stacks, rank_of_name
from tracekit.readers.sources import Source

LARGEST_FILE = 64 << 20
MOST_THREADS, MOST_FRAMES, LONGEST_TEXT = 512, 256, 300
_THREAD = re.compile(r"^(?:Current thread|Thread) (?:0x[0-9a-f]+|\d+)\b")
_LINE = re.compile(r'^\s+File "(?P<file>[^"]{1,500})", line (?P<line>\d{1,9}),? in (?P<name>.{1,300})$')
_PY_SPY = re.compile(r"^\s+(?P<name>\S{1,300}) \((?P<file>[^()]{1,500}):(?P<line>\d{1,9})\)$")
_RAISED = re.compile(r"^(?P<error>[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Warning)\b.*)$")


def read_stacks(source: Source) -> Stacks:
    """The stacks of one file. Raises InputError where it holds none."""
    with source.open() as file:
        text = file.read(LARGEST_FILE).decode("utf-8", "replace")
    threads: list[list[Frame]] = []
    error = ""
    raised: list[Frame] | None = None
    for line in text.splitlines():
        if line.startswith("Traceback (most recent call last)"):
            raised = []
        elif _THREAD.match(line) and len(threads) < MOST_THREADS:
            raised = None
            threads.append([])
        elif match := _LINE.match(line) or _PY_SPY.match(line):
            into = raised if raised is not None else threads[-1] if threads else None
            if into is not None and len(into) < MOST_FRAMES:
                into.append(Frame(match["name"][:LONGEST_TEXT], match["file"], int(match["line"])))
        elif raised is not None and (told := _RAISED.match(line)):
            threads.insert(0, raised[::-1])
            error, raised = told["error"][:LONGEST_TEXT], None
    if not any(threads):
        raise InputError(f"{source.name} holds no Python stack", "dump it with faulthandler.dump_traceback or py-spy dump")
    return Stacks(source.name, rank_of_name(source.name), sorted(filter(None, threads), key=_main_last), error)


def _main_last(thread: list[Frame]) -> bool:
    """False for the main thread, which runs a module: it comes first."""
    return all(frame.name != "<module>" for frame in thread)
