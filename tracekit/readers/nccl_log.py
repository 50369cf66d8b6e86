"""What NCCL writes with NCCL_DEBUG=INFO (and NCCL_DEBUG_SUBSYS=COLL), and what ``ncclras`` prints: communicators, calls, warnings.

Lines as NCCL 2.10 to 2.27 print them; ``HOST:PID:THREAD [DEVICE] NCCL INFO`` stands before each. Of one log of several processes each
process is told apart by host and number; its rank is that in its largest communicator.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tracekit.readers.hang_files import NcclCommunicator, NcclLog, rank_of_name
from tracekit.readers.ras import RasText
from tracekit.readers.sources import Source
from tracekit.readers.whole import read_whole

LARGEST_FILE = 1 << 30
MOST_LINES, MOST_WARNINGS, MOST_COMMUNICATORS, LONGEST_TEXT = 5_000_000, 200, 65_536, 300
_PROCESS = re.compile(r"(\S{1,200}:\d{1,10}):\d{1,10} \[")
_INIT = re.compile(r"comm (0x[0-9a-f]{1,16}) rank (\d{1,9}) n?Ranks (\d{1,9})", re.IGNORECASE)
_ID = re.compile(r"commId (0x[0-9a-f]{1,16})", re.IGNORECASE)
_NODES = re.compile(r"\bnNodes (\d{1,9})")
_CALL = re.compile(r"NCCL INFO (\w{1,40}): opCount ([0-9a-f]{1,16}) .*?\bcomm (0x[0-9a-f]{1,16})", re.IGNORECASE)
_WARN = re.compile(r"NCCL WARN (.*)$")
_CHANNELS = re.compile(r"(\d{1,5}) coll channels")
_NETWORK = re.compile(r"NCCL INFO (?:Using network|NET/\w+ ?: Using) (.*)$")
_VERSION = re.compile(r"[NR]CCL version (\d[\w.]{0,30})")


def read_nccl_log(source: Source) -> NcclLog:
    """The communicators, the last call on each of them, and the warnings of one log, or of the text of ``ncclras``."""
    found = _Lines()
    data = read_whole(source.name, source.open, LARGEST_FILE, "keep the part around the hang")
    for number, line in enumerate(_lines(data)):
        if number >= MOST_LINES:
            break
        found.line(line)
    communicators = list(found.communicators.values())
    warnings = list(dict.fromkeys([*found.warnings, *found.ras.warnings]))[:MOST_WARNINGS]
    late = found.ras.late
    return NcclLog(source.name, rank_of_name(source.name), communicators, warnings, found.version, found.network, late, ras=bool(late))


def _lines(data: bytes) -> Iterator[str]:
    at = 0
    while at < len(data):
        end = data.find(b"\n", at)
        end = len(data) if end < 0 else end
        yield data[at : min(end, at + 4096)].decode("utf-8", "replace").rstrip()
        at = end + 1


class _Lines:
    """What was found so far; one communicator of one process under the process and its address there."""

    def __init__(self) -> None:
        self.communicators: dict[tuple[str, str], NcclCommunicator] = {}
        self.warnings: list[str] = []
        self.version = self.network = ""
        self._last: dict[str, NcclCommunicator] = {}
        self.ras = RasText()

    def line(self, line: str) -> None:
        """One more line of the log."""
        if "NCCL" not in line and "RCCL version" not in line:
            self.ras.line(line)
            return
        if found := _WARN.search(line):
            self._warn(found[1])
        elif found := _CALL.search(line):
            one = self.communicators.get((self._process(line), found[3]))
            if one is not None:
                one.kind, one.count = found[1], int(found[2], 16)
        elif found := _INIT.search(line):
            self._init(line, found)
        elif found := _CHANNELS.search(line):
            if (last := self._last.get(self._process(line))) is not None:
                last.channels = int(found[1])
        elif found := _NETWORK.search(line):
            self.network = self.network or found[1][:LONGEST_TEXT]
        elif found := _VERSION.search(line):
            self.version = self.version or found[1]

    def _init(self, line: str, found: re.Match[str]) -> None:
        """A line that tells a communicator: while it is made, and once it is complete."""
        key = self._process(line), found[1]
        one = self.communicators.get(key)
        if one is None or (one.rank, one.ranks) != (int(found[2]), int(found[3])):
            if len(self.communicators) >= MOST_COMMUNICATORS:
                return
            one = self.communicators[key] = NcclCommunicator(int(found[2]), int(found[3]), found[1], key[0])
        self._last[key[0]] = one
        if told := _ID.search(line):
            one.name = told[1]
        if told := _NODES.search(line):
            one.nodes = int(told[1])
        one.complete = one.complete or "Init COMPLETE" in line

    def _process(self, line: str) -> str:
        found = _PROCESS.search(line)
        return found[1] if found else ""

    def _warn(self, text: str) -> None:
        if len(self.warnings) < MOST_WARNINGS:
            self.warnings.append(text.strip()[:LONGEST_TEXT])
