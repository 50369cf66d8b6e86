"""What ``ncclras`` prints, as text (NCCL 2.24 and later) and as JSON (``-f json``, 2.28 and later): who is behind, who does not answer.

The text lists single ranks only where they are few; under ``#0-0 (COMMUNICATOR) MISMATCH`` stand the counts of launched operations, under
``INCOMPLETE`` and ``DEAD`` the processes that do not answer. The JSON has every rank of every communicator with its counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from tracekit.errors import InputError
from tracekit.readers.hang_files import NcclCommunicator, NcclLate, NcclLog, rank_of_name
from tracekit.readers.sources import Source, clean
from tracekit.readers.whole import read_whole

LARGEST_FILE = 1 << 28
MOST_RANKS, MOST_WARNINGS, LONGEST_TEXT = 1_000_000, 200, 300
_HEAD = re.compile(r"^#\d+-\d+ \((\w{1,40})\) (\w{1,30})|^(DEAD|INCOMPLETE)\s*$")
_GONE = ("DEAD", "INCOMPLETE")
_KIND = re.compile(r"have different (\w{1,40}) operation counts")
_MANY = re.compile(r"^\s+(\d{1,9}) ranks? ha(?:ve|s) (?:launched up to operation (\d{1,18})|not (?:yet )?launched any)")
_ONE = re.compile(r"^\s+Rank (\d{1,9}) has (?:launched up to operation (\d{1,18})|not (?:yet )?launched any)")
_LISTED = re.compile(r"^\s+Rank (\d{1,9}) -- ")
_MISSING = re.compile(r"missing ranks?: ([\d, ]{1,2000})", re.IGNORECASE)
_PROCESS = re.compile(r"^\s+Process (\d{1,10}) on node (\S{1,200})")
#: NCCL 2.28.9 leaves the comma out that should stand before the status of a missing rank.
_NO_COMMA = re.compile(rb'([0-9"el])(\s*\n\s*"status"\s*:)')


def read_ras_json(source: Source) -> NcclLog:
    """Every rank of every communicator as ``ncclras -f json`` has them. Raises InputError for a damaged text."""
    data = read_whole(source.name, source.open, LARGEST_FILE, "ask ncclras of one job")
    try:
        document = msgspec.json.decode(_NO_COMMA.sub(rb"\1,\2", data))
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise InputError(f"{clean(source.name)} is damaged: it is no JSON of ncclras to its end", "ask ncclras again") from error
    listed = document.get("communicators") if isinstance(document, dict) else None
    communicators: list[NcclCommunicator] = []
    late: list[NcclLate] = []
    for one in listed if isinstance(listed, list) else []:
        if isinstance(one, dict):
            communicators += _ranks(one, MOST_RANKS - len(communicators))
            late += _gone(one)
    version = document.get("nccl_version") if isinstance(document, dict) else None
    warnings = [f"RAS: rank {rank} of communicator {one.communicator} is {one.gone}" for one in late for rank in one.ranks][:MOST_WARNINGS]
    told = version[:40] if isinstance(version, str) else ""
    return NcclLog(source.name, rank_of_name(source.name), communicators, warnings, told, late=late, ras=True)


def _ranks(one: Mapping[str, Any], most: int) -> list[NcclCommunicator]:
    """The ranks of a communicator; their last call is the operation of which they have launched different numbers."""
    ranks = [rank for rank in _list(one, "ranks") if _count(rank.get("rank")) >= 0][:most]
    counts = [{str(k): _count(v) for k, v in _dict(rank, "collective_counts").items() if _count(v) >= 0} for rank in ranks]
    kinds = list(dict.fromkeys(kind for found in counts for kind in found))
    spread = {kind: max(c.get(kind, 0) for c in counts) - min(c.get(kind, 0) for c in counts) for kind in kinds}
    total = {kind: sum(c.get(kind, 0) for c in counts) for kind in kinds}
    kind = max(kinds, key=lambda kind: (spread[kind], total[kind]), default="")
    size = max(_count(one.get("size")), len(ranks))
    return [
        NcclCommunicator(
            rank["rank"], size, str(one.get("hash"))[:40], f"{str(rank.get('host'))[:200]}:{rank.get('pid')}:{rank.get('cuda_dev')}",
            complete=_dict(rank, "status").get("init_state", 0) == 0, kind=kind[:40], count=sum(found.values()) - 1,
        )
        for rank, found in zip(ranks, counts, strict=True)
    ]  # fmt: skip


def _gone(one: Mapping[str, Any]) -> list[NcclLate]:
    found = []
    for rank in _list(one, "missing_ranks"):
        status = {**rank, **_dict(rank, "status")}
        word = (
            "considered dead"
            if status.get("considered_dead") is True
            else "unresponsive"
            if status.get("unresponsive") is True
            else "missing"
        )
        number = _count(rank.get("rank"))
        where = f"process {rank.get('pid')} on {str(rank.get('host'))[:200]}"
        found.append(NcclLate(str(one.get("hash"))[:40], [number] if number >= 0 else [], gone=f"{word} ({where})"))
    return found[:MOST_WARNINGS]


def _list(of: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    value = of.get(key)
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _dict(of: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = of.get(key)
    return value if isinstance(value, dict) else {}


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62 else -1


class RasText:
    """The lines of ``ncclras`` one by one; ``late`` and ``warnings`` is what they say."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self._blocks: list[_Block] = []

    def line(self, line: str) -> None:
        """One more line of the text."""
        if found := _HEAD.match(line):
            if len(self._blocks) < MOST_WARNINGS:
                self._blocks.append(_Block(found[1] or "", found[2] or found[3]))
        elif self._blocks and line.strip():
            self._blocks[-1].line(line)
            if line[:1].isspace() and len(self.warnings) < MOST_WARNINGS:
                name = self._blocks[-1].communicator
                of = f"communicator {name} {self._blocks[-1].word}" if name else self._blocks[-1].word
                self.warnings.append(f"RAS: {of}: {line.strip()}"[:LONGEST_TEXT])

    @property
    def late(self) -> list[NcclLate]:
        """Who is behind on which communicator, and who does not answer."""
        gone = [block for block in self._blocks if block.word in _GONE and (block.missing or block.processes)]
        where = ", ".join([process for block in gone for process in block.processes][:4])
        word = ("considered dead" if any(block.word == "DEAD" for block in gone) else "missing") + (f" ({where})" if where else "")
        named = [NcclLate(block.communicator, block.missing, gone=word) for block in gone if block.missing]
        found = named or [NcclLate("", [], gone=word)] if gone else []
        return found + [late for block in self._blocks if block.word not in _GONE for late in block.late()]


class _Block:
    """What stands under one ``#0-0 (COMMUNICATOR) WORD``: (operation, number of ranks, those that are listed)."""

    def __init__(self, communicator: str, word: str) -> None:
        self.communicator, self.word, self.kind = communicator, word, ""
        self.counts: list[tuple[int, int, list[int]]] = []
        self.missing: list[int] = []
        self.processes: list[str] = []

    def line(self, line: str) -> None:
        if found := _KIND.search(line):
            self.kind = "" if found[1] == "collective" else found[1]
        elif found := _MANY.match(line):
            self.counts.append((int(found[2] or 0), int(found[1]), []))
        elif found := _ONE.match(line):
            self.counts.append((int(found[2] or 0), 1, [int(found[1])]))
        elif (found := _LISTED.match(line)) and self.counts:
            self.counts[-1][2].append(int(found[1]))
        elif found := _MISSING.search(line):
            self.missing += [int(number) for number in re.findall(r"\d{1,9}", found[1])]
        elif found := _PROCESS.match(line):
            self.processes.append(f"process {found[1]} on {found[2]}")

    def late(self) -> list[NcclLate]:
        if len(self.counts) < 2:
            return []
        most = max(operation for operation, _, _ in self.counts)
        ahead = sum(number for operation, number, _ in self.counts if operation == most)
        behind = [(operation, number, ranks) for operation, number, ranks in self.counts if operation < most]
        return [
            NcclLate(self.communicator, sorted(ranks), number, operation, ahead, most, self.kind) for operation, number, ranks in behind
        ]
