"""Whose trace a file is: its rank by everything that says so, and then the ranks of all files of a job together.

Three things can tell a rank. ``distributedInfo.rank`` is the profiler's own word, but some launchers leave the local rank there, and some
traces lack it. The file name tells what its writer meant. ``Rank`` of the collectives on the default group (``record_param_comms``) is
what the process itself used, where it was recorded; it wins over the others where they contradict each other.

No file ever takes the place of another without a word: two files that cannot both be one rank are told apart by what else they say, or
one of them is set aside, and both are named.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tracekit.notes import Note, note
from tracekit.readers import evidence
from tracekit.readers.sources import shown
from tracekit.trace.events import Coverage, RankTables

INFO, NAME, RECORDS, NONE = "distributedInfo", "file name", "record_param_comms", "none"

_NUMBER = re.compile(r"([0-9]+)")

_WHAT_TELLS = {INFO: "distributedInfo", NAME: "the file's name", RECORDS: "record_param_comms (Rank of collectives on the default group)"}


@dataclass(frozen=True)
class Identity:
    """What one file says about itself.

    ``rank`` is None where nothing tells it; ``source`` is what told it (distributedInfo, file name, record_param_comms, none). ``claims``
    has every source that told a rank; a second distributedInfo is called ``distributedInfo 2``. ``world_size`` is None, the strings ''
    where unknown. ``process`` is ``host:pid`` of the Python process. ``notes`` say what was odd about the rank.
    """

    rank: int | None
    source: str
    claims: Mapping[str, int]
    world_size: int | None
    backend: str
    device_name: str
    host: str
    process: str
    notes: list[Note] = field(default_factory=list)


def identify(tables: RankTables, file_name: str) -> Identity:
    """Rank, world size, backend, device, host and process of a trace; ``file_name`` may have folders before it."""
    infos = evidence.distributed_infos(tables.metadata)
    pid = evidence.process_id(tables)
    world, doubted = evidence.world_size(infos, tables)
    named_host = evidence.host_of_name(file_name, tables)
    claims, impossible = _claims(infos, tables, file_name, world, named_host)
    rank, source, doubts = _decide(claims, bool(infos))
    host_name = tables.metadata.get("host_name")
    host = host_name if isinstance(host_name, str) and host_name else named_host
    backend = next((str(info["backend"]) for info in infos if isinstance(info.get("backend"), str)), "")
    return Identity(
        rank=rank,
        source=source,
        claims=claims,
        world_size=world,
        backend=backend or evidence.backend_of_events(tables),
        device_name=evidence.device_name(tables),
        host=host,
        process="" if pid is None else f"{host}:{pid}",
        notes=[*doubted, *impossible, *doubts],
    )


def what_tells(source: str) -> str:
    """A source of a rank in words."""
    return _WHAT_TELLS.get(source, source)


def _claims(
    infos: list[dict[str, Any]], tables: RankTables, file_name: str, world: int | None, named_host: str
) -> tuple[dict[str, int], list[Note]]:
    claims: dict[str, int] = {}
    notes = []
    for index, info in enumerate(infos):
        rank = evidence.count_of(info.get("rank"), 0)
        if rank is not None and world is not None and rank >= world:
            notes.append(note("impossible_rank", rank=rank, world=world))
        elif rank is not None:
            claims[INFO if index == 0 else f"{INFO} {index + 1}"] = rank
    others = {NAME: evidence.rank_of_name(file_name, named_host), RECORDS: evidence.rank_of_records(tables, world)}
    return claims | {source: rank for source, rank in others.items() if rank is not None and (world is None or rank < world)}, notes


def _decide(claims: Mapping[str, int], has_info: bool) -> tuple[int | None, str, list[Note]]:
    """(rank, what tells it, what makes it doubtful)."""
    written = [(source, rank) for source, rank in claims.items() if source.startswith(INFO)]
    if len({rank for _, rank in written}) > 1:
        backed = [(len(_backers(claims, rank)), rank, source) for source, rank in written]
        _, rank, source = max(backed, key=lambda item: item[0])
        backers = tuple(what_tells(other) for other in _backers(claims, rank))
        return rank, source, [note("several_infos", rank=rank, backers=backers)]
    if written:
        return written[0][1], written[0][0], []
    for source in (NAME, RECORDS):
        if source in claims:
            code = "rank_not_in_info" if has_info else "no_distributed_info"
            return claims[source], source, [note(code, rank=claims[source], source=what_tells(source))]
    return None, NONE, []


def _backers(claims: Mapping[str, int], rank: int) -> list[str]:
    return [source for source in (NAME, RECORDS) if claims.get(source) == rank]


# All files of a job -----------------------------------------------------------------------------------------------------

#: A file of the job: its coverage, what it says about itself, and the first and last time in it [ns] (None: it has no times).
Claimant = tuple[Coverage, Identity, tuple[int, int] | None]


def resolve(files: Sequence[Claimant]) -> tuple[list[int | None], list[list[Note]], list[Note]]:
    """Final rank of each file (None: not used), notes on each file, and notes on the job.

    Notes on a file are also put in each file's coverage, with its rank and a worse status
    (``duplicate``, ``skipped``) where it is not used.
    Files of one rank that lie apart in time are windows of that rank and share it. The only process of a job is rank 0; the rank in
    its coverage stays None where nothing told it.
    """
    first = [identity.rank for _, identity, _ in files]
    ranks = _settle(files, first)
    _adopt_windows(files, ranks)
    numbered = _adopt_numbers(files, ranks)
    for (coverage, _, _), rank in zip(files, ranks, strict=True):
        coverage.rank = rank
    of_file, of_job = _changes(files, first, ranks, numbered)
    if numbered:
        of_job.append(note("ranks_of_numbers", len(files)))
    unknown, of_all = _set_unknown(files, ranks)
    duplicates = _set_duplicates(files, ranks)
    for i, (coverage, _, _) in enumerate(files):
        of_file[i] += [found for found in (unknown.get(i), duplicates.get(i)) if found is not None]
        for found in of_file[i]:
            coverage.note(found)
    return ranks, of_file, of_job + of_all


def conflict(one: Claimant, other: Claimant) -> bool:
    """Whether two files of one rank contradict each other: recorded at the same time, on two hosts, or named for two ranks."""
    a, b = one[1], other[1]
    if one[2] is not None and other[2] is not None and one[2][0] < other[2][1] and other[2][0] < one[2][1]:
        return True
    if a.process == b.process != "":
        return False
    named_apart = NAME in a.claims and NAME in b.claims and a.claims[NAME] != b.claims[NAME]
    return named_apart or "" != a.host != b.host != ""


# Who is who ----------------------------------------------------------------------------------------------------------


def _settle(files: Sequence[Claimant], first: list[int | None]) -> list[int | None]:
    """Ranks by each file's own best word, unless its collectives contradict it, or files that contradict each other tell better ones."""
    ranks = [identity.claims.get(RECORDS, rank) for (_, identity, _), rank in zip(files, first, strict=True)]
    torn = _torn(files, ranks)
    if not torn:
        return ranks
    for source in (RECORDS, NAME, INFO):
        other = [identity.claims.get(source) for _, identity, _ in files]
        if None not in other and not _torn(files, other):
            return other
    for source in (RECORDS, NAME):
        other = [files[i][1].claims.get(source, rank) if i in torn else rank for i, rank in enumerate(ranks)]
        if other != ranks and not _torn(files, other):
            return other
    return ranks


def _torn(files: Sequence[Claimant], ranks: Sequence[int | None]) -> set[int]:
    """Files that contradict another file of the same rank."""
    return {i for pair in _pairs(files, ranks) for i in pair}


def _pairs(files: Sequence[Claimant], ranks: Sequence[int | None]) -> list[tuple[int, int]]:
    """Pairs (kept, contradicting) of files: each file is held against those of its rank that were kept before it."""
    kept: dict[int, list[int]] = {}
    pairs: list[tuple[int, int]] = []
    for i in sorted(range(len(files)), key=lambda i: (_worth(files[i][0]), i)):
        rank = ranks[i]
        if rank is None:
            continue
        against = next((j for j in kept.setdefault(rank, []) if conflict(files[j], files[i])), None)
        if against is None:
            kept[rank].append(i)
        else:
            pairs.append((against, i))
    return pairs


def _worth(coverage: Coverage) -> int:
    """0 for a file that was read to its end, 1 for one that was cut off, 2 for one without events."""
    if coverage.events == 0:
        return 2
    return 1 if coverage.status == "truncated" else 0


def _adopt_windows(files: Sequence[Claimant], ranks: list[int | None]) -> None:
    """A file without a rank is another window of a process whose rank is known, if it is of that process (on a known host)."""
    known = {files[i][1].process: rank for i, rank in enumerate(ranks) if rank is not None and files[i][1].host}
    for i, (_, identity, _) in enumerate(files):
        if ranks[i] is None and identity.host:
            ranks[i] = known.get(identity.process)


def _adopt_numbers(files: Sequence[Claimant], ranks: list[int | None]) -> bool:
    """Files of which none tells a rank, recorded at one time and named alike but for one number, 0 to n - 1: it is their rank."""
    spans = [span for _, _, span in files if span is not None]
    if len(files) < 2 or len(spans) < len(files) or any(rank is not None for rank in ranks) or len(set(spans)) < len(spans):
        return False
    parts = [_NUMBER.split(re.sub(r"\\", "/", coverage.file)) for coverage, _, _ in files]
    if len({len(part) for part in parts}) > 1 or max(low for low, _ in spans) >= min(high for _, high in spans):
        return False
    differing = [values for values in zip(*parts, strict=True) if len(set(values)) > 1]
    if len(differing) != 1 or {int(value) for value in differing[0] if value.isdecimal() and len(value) < 8} != set(range(len(files))):
        return False
    ranks[:] = [int(value) for value in differing[0]]
    return True


def _changes(
    files: Sequence[Claimant], first: list[int | None], ranks: list[int | None], numbered: bool
) -> tuple[list[list[Note]], list[Note]]:
    """(notes on each file, notes on the job): what the files tell of themselves, and where their first rank was not believed."""
    of_file = [list(identity.notes) for _, identity, _ in files]
    of_job: list[Note] = []
    pairs = _pairs(files, first)
    twins = dict(pairs) | {other: kept for kept, other in pairs}
    for i, (coverage, identity, _) in enumerate(files):
        before, after = first[i], ranks[i]
        if before is None and after is not None and not numbered:
            of_file[i].append(note("rank_of_same_process", rank=after, process=shown(identity.process)))
        elif before != after and before is not None:
            better = next((s for s in (RECORDS, NAME) if identity.claims.get(s) == after), INFO)
            claim: dict[str, Any] = {"source": what_tells(identity.source), "better": what_tells(better), "before": before, "after": after}
            if i in twins:
                one, other = sorted((shown(coverage.file), shown(files[twins[i]][0].file)))
                of_job.append(note("ranks_of_same_claim", one=one, other=other, **claim))
                of_file[i].append(note("rank_of_same_claim", one=one, other=other, **claim))
            else:
                of_file[i].append(note("rank_not_believed", **claim))
    return of_file, of_job


# Files that get no rank ----------------------------------------------------------------------------------------------


def _set_unknown(files: Sequence[Claimant], ranks: list[int | None]) -> tuple[dict[int, Note], list[Note]]:
    """(note on each file whose rank stays unknown, notes on the job)."""
    unknown = [i for i, rank in enumerate(ranks) if rank is None]
    if not unknown:
        return {}, []
    alone = [0 if i in unknown else None for i in range(len(files))]
    one_process = len(unknown) == 1 or len({files[i][1].process for i in unknown} - {""}) == 1
    if len(unknown) == len(files) and one_process and not _torn(files, alone):
        for i in unknown:
            ranks[i] = 0
        return {}, [note("one_process")]
    for i in unknown:
        files[i][0].note(note("rank_unknown"), "skipped")
    return {i: note("rank_unknown") for i in unknown}, []


def _set_duplicates(files: Sequence[Claimant], ranks: list[int | None]) -> dict[int, Note]:
    """Takes the rank from files of which another one stands for it and its time; a note on each."""
    found = {}
    for kept, other in _pairs(files, ranks):
        name, rank = shown(files[kept][0].file), ranks[other]
        same = files[kept][1].process == files[other][1].process != ""
        whole = files[kept][2] == files[other][2] or "truncated" in (files[kept][0].status, files[other][0].status)
        code = ("same_window_again" if whole else "part_of_window") if same else "same_rank_claimed"
        found[other] = note(code, rank=rank, other=name, own=shown(files[other][0].file))
        files[other][0].note(found[other], "duplicate")
        ranks[other] = None
    return found
