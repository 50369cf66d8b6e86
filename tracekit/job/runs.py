"""Which recordings are one job. Two are, unless something speaks against it:

    another world size, device or mesh
    the same rank recorded again by another process, or at a later time with steps that do not go on
    a day (half of one, to be safe with clocks) between them, unless one process recorded both

Files that claim one rank for one time may also be a launcher's mistake (it left the local rank in the trace); they are that as long as
there are no more files than ranks, and ``readers.identity`` settles it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import PurePath

from tracekit.errors import UsageError
from tracekit.job.activity import Window
from tracekit.readers.identity import RECORDS
from tracekit.units import NS_PER_S, format_bytes, listed

#: Recordings of one launch are no further apart than this.
_APART_NS = 12 * 3600 * NS_PER_S
#: Times before this (the year 2000) count from something else than 1970, and cannot be compared.
_EPOCH_NS = 946_684_800 * NS_PER_S
_MOST_LISTED = 8


@dataclass(frozen=True)
class Run:
    """One job among several that were found."""

    name: str  # what --run takes
    paths: tuple[str, ...]
    ranks: tuple[int, ...]
    world_size: int | None
    steps: tuple[int, ...]
    start_ns: int  # Unix time of its first event; 0 where the trace does not tell
    size: int  # bytes of its files as stored

    @property
    def start(self) -> str | None:
        """Time of its first event, UTC."""
        if self.start_ns < _EPOCH_NS:
            return None
        return datetime.fromtimestamp(self.start_ns // NS_PER_S, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def told(self) -> str:
        """The run for a user who has to choose."""
        of = f" of {self.world_size}" if self.world_size else ""
        ranks = f"rank{'s' if len(self.ranks) > 1 else ''} {listed(self.ranks, 6)}{of}"
        files = f"{len(self.paths)} file{'s' if len(self.paths) > 1 else ''}, {format_bytes(self.size)}"
        return f"{self.name} ({', '.join([ranks, self.start or 'time not known', files, self.paths[0]])})"


@dataclass
class _Members:
    """The windows of one run so far, and what they agree on."""

    windows: list[int] = field(default_factory=list)
    by_rank: dict[int | None, list[int]] = field(default_factory=dict)
    facts: dict[str, object] = field(default_factory=dict)
    low: int = 0
    high: int = 0


def one_run(windows: Sequence[Window], sizes: Mapping[str, int], wanted: str | None = None) -> tuple[list[Window], list[Run]]:
    """(the windows of the job, all runs that were found if there are several). ``sizes``: bytes of each file; ``wanted``: a run's name.

    Raises UsageError, which lists the runs, where there are several and none was chosen.
    """
    traced = [window for window in windows if window.has_events]
    parts = _parted(traced)
    if len(parts) < 2:
        if wanted is not None:
            raise UsageError(f"there is no run {wanted!r}: what was found is one job", "leave --run out")
        return list(windows), []
    runs = _described([[traced[i] for i in part] for part in parts], sizes)
    if wanted is None:
        raise UsageError(_found(runs), f"choose one with --run, for example --run {runs[0].name}, or give its path alone")
    chosen = [i for i, run in enumerate(runs) if wanted == run.name]
    if not chosen:
        raise UsageError(f"there is no run {wanted!r}; {_found(runs)}", f"for example --run {runs[0].name}")
    kept = {id(traced[i]) for i in parts[chosen[0]]}
    return [window for window in windows if id(window) in kept or _beside(window, runs[chosen[0]])], runs


def _found(runs: Sequence[Run]) -> str:
    more = f"; {len(runs) - _MOST_LISTED} more" if len(runs) > _MOST_LISTED else ""
    return f"these are {len(runs)} runs, not one job: {'; '.join(run.told() for run in runs[:_MOST_LISTED])}{more}"


def _beside(window: Window, run: Run) -> bool:
    """Whether a memory snapshot lies in a folder of the run."""
    return not window.has_events and os.path.dirname(window.coverage.file) in {os.path.dirname(path) for path in run.paths}  # noqa: PTH120


# ---- parting them ------------------------------------------------------------------------------------------------------


def _parted(windows: Sequence[Window]) -> list[list[int]]:
    """Windows of each run, the earliest run first."""
    runs: list[_Members] = []
    worlds = [window.identity.world_size for window in windows if window.identity.world_size]
    crowded = bool(worlds) and len(windows) > max(worlds)  # more files than ranks: some rank was recorded twice
    for index in sorted(range(len(windows)), key=lambda i: (windows[i].span, windows[i].coverage.file)):
        window = windows[index]
        home = next((run for run in reversed(runs) if _fits(window, run, windows, crowded)), None)
        if home is None:
            home = _Members(low=window.span[0], high=window.span[1])
            runs.append(home)
        home.windows.append(index)
        home.by_rank.setdefault(_rank(window), []).append(index)
        home.facts = {**_facts(window), **home.facts}
        home.low, home.high = min(home.low, window.span[0]), max(home.high, window.span[1])
    return [sorted(run.windows) for run in runs]


def _rank(window: Window) -> int | None:
    return window.identity.claims.get(RECORDS, window.identity.rank)


def _facts(window: Window) -> dict[str, object]:
    """What all ranks of one launch have in common, as far as it is known."""
    mesh = tuple((axis.name, axis.size) for axis in window.manifest.mesh) if window.manifest is not None else ()
    found = {"world size": window.identity.world_size, "device": window.identity.device_name, "mesh": mesh}
    return {name: value for name, value in found.items() if value}


def _fits(window: Window, run: _Members, windows: Sequence[Window], crowded: bool) -> bool:
    same = [windows[i] for i in run.by_rank.get(_rank(window), [])] if _rank(window) is not None else []
    if any(_same_process(window, other) for other in same):
        return True
    if any(run.facts.get(name, value) != value for name, value in _facts(window).items()):
        return False
    if any(_again(window, other, crowded) for other in same):
        return False
    low, high = window.span
    comparable = min(low, run.low) >= _EPOCH_NS
    return not comparable or max(low - run.high, run.low - high) < _APART_NS


def _same_process(one: Window, other: Window) -> bool:
    """Whether one process recorded both; a process number alone, without a host, is the same in many containers."""
    process = one.identity.process
    if not process or process != other.identity.process:
        return False
    repeats = not set(one.steps.number.tolist()).isdisjoint(other.steps.number.tolist())
    elsewhere = PurePath(one.coverage.file).parent != PurePath(other.coverage.file).parent
    return bool(one.identity.host) or one.span == other.span or not (repeats and elsewhere)


def _again(window: Window, other: Window, crowded: bool) -> bool:
    """Whether two windows of one rank, not known to be of one process, are two recordings of it."""
    if window.span[0] < other.span[1] and other.span[0] < window.span[1]:
        return crowded  # at one time: else a launcher's mistake about ranks
    if window.identity.process and other.identity.process:
        return True
    steps, before = window.steps.number, other.steps.number
    return bool(len(steps) and len(before) and steps.min() <= before.max())


# ---- describing them ---------------------------------------------------------------------------------------------------


def _described(parts: Sequence[Sequence[Window]], sizes: Mapping[str, int]) -> list[Run]:
    names = _names([[window.coverage.file for window in part] for part in parts])
    runs = []
    for name, part in zip(names, parts, strict=True):
        paths = tuple(sorted(window.coverage.file for window in part))
        ranks = tuple(sorted({rank for window in part if (rank := _rank(window)) is not None}))
        world = max((window.identity.world_size or 0 for window in part), default=0) or None
        steps = tuple(sorted({int(number) for window in part for number in window.steps.number}))
        start = min(window.span[0] for window in part)
        runs.append(Run(name, paths, ranks, world, steps, start, sum(sizes.get(path, 0) for path in paths)))
    return runs


def _names(paths: Sequence[Sequence[str]]) -> list[str]:
    """The folder of each run below the folder of all, where these differ; else run1, run2, ... in order of time."""
    folders = [os.path.commonpath([os.path.dirname(path) or "." for path in part]) for part in paths]  # noqa: PTH120
    top = os.path.commonpath(folders) if len({folder.startswith("/") for folder in folders}) == 1 else ""
    names = [os.path.relpath(folder, top) if top else folder for folder in folders]
    plain = len(set(names)) == len(names) and "." not in names and not any("://" in name or name.startswith("..") for name in names)
    return names if plain else [f"run{number}" for number in range(1, len(paths) + 1)]
