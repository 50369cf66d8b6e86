"""What NCCL writes with NCCL_DEBUG=INFO (and NCCL_DEBUG_SUBSYS=COLL): communicators, the calls of each rank, warnings.

Lines as NCCL 2.10 to 2.27 print them; ``HOST:PID:THREAD [DEVICE] NCCL INFO`` stands before each.
"""

from __future__ import annotations

import re

from tracekit.readers.hang_files import NcclLog, rank_of_name
from tracekit.readers.sources import Source

LARGEST_FILE = 1 << 30
MOST_LINES, MOST_WARNINGS, LONGEST_TEXT = 5_000_000, 200, 300
_INIT = re.compile(r"comm (0x[0-9a-f]+) rank (\d+) n?Ranks (\d+).*?(?:commId (0x[0-9a-f]+))?[^\n]* - Init COMPLETE", re.IGNORECASE)
_CALL = re.compile(r"NCCL INFO (\w+): opCount ([0-9a-f]+) .*?count (\d+) .*?comm (0x[0-9a-f]+)")
_WARN = re.compile(r"NCCL WARN (.*)$")


def read_nccl_log(source: Source) -> NcclLog:
    """The communicators, the last call on each of them, and the warnings of one log."""
    communicators: dict[str, tuple[int, int, str]] = {}
    last: dict[str, tuple[str, int]] = {}
    warnings: list[str] = []
    with source.open() as file:
        for number, raw in enumerate(file):
            if number >= MOST_LINES:
                break
            line = raw[:4096].decode("utf-8", "replace").rstrip()
            if (found := _INIT.search(line)) is not None:
                communicators[found[1]] = (int(found[2]), int(found[3]), found[4] or found[1])
            elif (found := _CALL.search(line)) is not None:
                last[found[4]] = (found[1], int(found[2], 16))
            elif (found := _WARN.search(line)) is not None and len(warnings) < MOST_WARNINGS:
                warnings.append(found[1][:LONGEST_TEXT])
    calls = [(communicators[comm][0], communicators[comm][2], kind, count) for comm, (kind, count) in last.items() if comm in communicators]
    return NcclLog(source.name, rank_of_name(source.name), list(communicators.values()), calls, list(dict.fromkeys(warnings)))
