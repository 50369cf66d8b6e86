"""Whose trace a file is: its rank by everything that says so, and then the ranks of all files of a job together.

Three things can tell a rank. ``distributedInfo.rank`` is the profiler's own word, but some launchers leave the local rank there, and some
traces lack it. The file name tells what its writer meant. ``Rank`` of the collectives on the default group (``record_param_comms``) is
what the process itself used, where it was recorded; it wins over the others where they contradict each other.

No file ever takes the place of another without a word: two files that cannot both be one rank are told apart by what else they say, or
one of them is set aside, and both are named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tracekit.readers import evidence
from tracekit.readers.sources import shown
from tracekit.trace.events import Coverage, RankTables

INFO, NAME, RECORDS, NONE = "distributedInfo", "file name", "record_param_comms", "none"

_WHAT_TELLS = {INFO: "distributedInfo", NAME: "the file's name", RECORDS: "record_param_comms (Rank of collectives on the default group)"}
_UNKNOWN = (
    "its rank is unknown (no distributedInfo, no rank in its name, no collective on the default group), so it was not used: "
    "put the rank into the file's name, for example rank3.json"
)


@dataclass(frozen=True)
class Identity:
    """What one file says about itself.

    ``rank`` is None where nothing tells it; ``source`` is what told it (distributedInfo, file name, record_param_comms, none). ``claims``
    has every source that told a rank; a second distributedInfo is called ``distributedInfo 2``. ``world_size`` is None, the strings ''
    where unknown. ``process`` is ``host:pid`` of the Python process. ``problems`` are sentences for the user.
    """

    rank: int | None
    source: str
    claims: Mapping[str, int]
    world_size: int | None
    backend: str
    device_name: str
    host: str
    process: str
    problems: list[str] = field(default_factory=list)


def identify(tables: RankTables, file_name: str) -> Identity:
    """Rank, world size, backend, device, host and process of a trace; ``file_name`` may have folders before it."""
    problems: list[str] = []
    infos = evidence.distributed_infos(tables.metadata)
    pid = evidence.process_id(tables)
    world = evidence.world_size(infos, tables)
    named_host = evidence.host_of_name(file_name, tables)
    claims = _claims(infos, tables, file_name, world, named_host, problems)
    rank, source = _decide(claims, bool(infos), problems)
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
        problems=problems,
    )


def what_tells(source: str) -> str:
    """A source of a rank in words."""
    return _WHAT_TELLS.get(source, source)


def _claims(
    infos: list[dict[str, Any]], tables: RankTables, file_name: str, world: int | None, named_host: str, problems: list[str]
) -> dict[str, int]:
    claims: dict[str, int] = {}
    for index, info in enumerate(infos):
        rank = evidence.count_of(info.get("rank"), 0)
        if rank is not None and world is not None and rank >= world:
            problems.append(f"distributedInfo says rank {rank} of {world}, which cannot be; that rank is not used")
        elif rank is not None:
            claims[INFO if index == 0 else f"{INFO} {index + 1}"] = rank
    others = {NAME: evidence.rank_of_name(file_name, named_host), RECORDS: evidence.rank_of_records(tables, world)}
    return claims | {source: rank for source, rank in others.items() if rank is not None and (world is None or rank < world)}


def _decide(claims: Mapping[str, int], has_info: bool, problems: list[str]) -> tuple[int | None, str]:
    written = [(source, rank) for source, rank in claims.items() if source.startswith(INFO)]
    if len({rank for _, rank in written}) > 1:
        backed = [(len(_backers(claims, rank)), rank, source) for source, rank in written]
        count, rank, source = max(backed, key=lambda item: item[0])
        why = " and ".join(what_tells(other) for other in _backers(claims, rank)) + " say the same" if count else "it is the first"
        problems.append(f"distributedInfo stands twice or more with different ranks; rank {rank} is used because {why}")
        return rank, source
    if written:
        return written[0][1], written[0][0]
    for source in (NAME, RECORDS):
        if source in claims:
            missing = "distributedInfo has no usable rank" if has_info else "there is no distributedInfo"
            problems.append(f"{missing}; rank {claims[source]} was inferred from {what_tells(source)}")
            return claims[source], source
    return None, NONE


def _backers(claims: Mapping[str, int], rank: int) -> list[str]:
    return [source for source in (NAME, RECORDS) if claims.get(source) == rank]


# All files of a job -----------------------------------------------------------------------------------------------------

#: A file of the job: its coverage, what it says about itself, and the first and last time in it [ns] (None: it has no times).
Claimant = tuple[Coverage, Identity, tuple[int, int] | None]


def resolve(files: Sequence[Claimant]) -> tuple[list[int | None], list[list[str]], list[str]]:
    """Final rank of each file (None: not used), problems of each file, and notes on the job.

    Problems are also noted in each file's coverage, with its rank and a worse status (``duplicate``, ``skipped``) where it is not used.
    Files of one rank that lie apart in time are windows of that rank and share it. The only process of a job is rank 0; the rank in
    its coverage stays None where nothing told it.
    """
    problems: list[list[str]] = [[] for _ in files]
    notes: list[str] = []
    first = [identity.rank for _, identity, _ in files]
    ranks = _settle(files, first)
    _adopt_windows(files, ranks)
    for (coverage, _, _), rank in zip(files, ranks, strict=True):
        coverage.rank = rank
    _changes(files, first, ranks, problems, notes)
    _set_unknown(files, ranks, problems, notes)
    _set_duplicates(files, ranks, problems)
    for (coverage, _, _), claimed in zip(files, problems, strict=True):
        for problem in claimed:
            coverage.note(problem)
    return ranks, problems, notes


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


def _changes(
    files: Sequence[Claimant], first: list[int | None], ranks: list[int | None], problems: list[list[str]], notes: list[str]
) -> None:
    pairs = _pairs(files, first)
    twins = dict(pairs) | {other: kept for kept, other in pairs}
    for i, (coverage, identity, _) in enumerate(files):
        problems[i] += identity.problems
        before, after = first[i], ranks[i]
        if before is None and after is not None:
            problems[i].append(f"rank {after} was taken from another window of the same process {shown(identity.process)}")
        elif before != after:
            better = next((s for s in (RECORDS, NAME) if identity.claims.get(s) == after), INFO)
            claimed = what_tells(identity.source)
            if i in twins:
                pair = sorted((shown(coverage.file), shown(files[twins[i]][0].file)))
                claim = f"{claimed} gives {pair[0]} and {pair[1]} the same rank {before}"
                notes.append(f"{claim}; their ranks were taken from {what_tells(better)}")
            else:
                claim = f"{claimed} says rank {before}"
            problems[i].append(f"{claim}; rank {after} of this file was taken from {what_tells(better)}")


# Files that get no rank ----------------------------------------------------------------------------------------------


def _set_unknown(files: Sequence[Claimant], ranks: list[int | None], problems: list[list[str]], notes: list[str]) -> None:
    unknown = [i for i, rank in enumerate(ranks) if rank is None]
    if not unknown:
        return
    alone = [0 if i in unknown else None for i in range(len(files))]
    one_process = len(unknown) == 1 or len({files[i][1].process for i in unknown} - {""}) == 1
    if len(unknown) == len(files) and one_process and not _torn(files, alone):
        notes.append("the rank is not recorded and there is nothing to tell it from: taken for rank 0 of a job of one process")
        for i in unknown:
            ranks[i] = 0
        return
    for i in unknown:
        problems[i].append(_UNKNOWN)
        files[i][0].note(_UNKNOWN, "skipped")


def _set_duplicates(files: Sequence[Claimant], ranks: list[int | None], problems: list[list[str]]) -> None:
    for kept, other in _pairs(files, ranks):
        name, rank = shown(files[kept][0].file), ranks[other]
        same = files[kept][1].process == files[other][1].process != ""
        if same:
            problem = f"is the same rank {rank}, process and time as {name}, so it was not used: keep one of the two"
        else:
            problem = (
                f"claims the same rank {rank} as {name}, for the same time or on another host, and nothing else tells the rank of "
                f"{shown(files[other][0].file)}, so it was not used: put each file's rank into its name, for example rank3.json"
            )
        problems[other].append(problem)
        files[other][0].note(problem, "duplicate")
        ranks[other] = None
