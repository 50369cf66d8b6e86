"""The collectives and messages of all traces as one table, numbered alike on all ranks, and as the dumps of a flight recorder.

Number of a collective in its group: its sequence number; without those its place among the group's matched ones, and behind the last
matched one counted on. Calls before the first match have no number that all ranks share: they are left out.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from tracekit.collectives.kinds import POINT_TO_POINT
from tracekit.job.activity import Window
from tracekit.job.model import Job
from tracekit.readers.hang_files import DONE, FROM_TRACE, SCHEDULED, STARTED, Calls, Dump, GroupInfo, Stacks
from tracekit.trace.events import Int64Array
from tracekit.units import NULL, format_ns

#: Kinds of which all members bring the same size, as a trace has it.
_ALIKE = ("all_reduce", "broadcast", "reduce")
NOT_RECORDED = "a group that is not recorded"


def calls_of(job: Job, windows: Mapping[int, int]) -> pd.DataFrame | None:
    """One row a call of the last window of each rank, by rank and start. ``ran``: something of it ran; times on the job's clock."""
    chosen = job.operations[job.operations["window"].isin(list(windows.values()))]
    frames = [frame for rank, window in windows.items() if len(frame := _of_window(job, chosen[chosen["window"] == window], rank, window))]
    if not frames:
        return None
    calls = pd.concat(frames, ignore_index=True)
    calls["p2p"] = calls["kind"].isin(POINT_TO_POINT)
    calls = calls.sort_values(["rank", "start"], kind="stable").reset_index(drop=True)
    calls["number"] = _numbers(job, calls)
    return calls[calls["number"] != NULL].reset_index(drop=True)


def _of_window(job: Job, operations: pd.DataFrame, rank: int, number: int) -> pd.DataFrame:
    window = job.windows[number]
    ending = window.ending
    assert ending is not None
    local = operations["local"].to_numpy()
    shift = int(job.aligned(number, 0))
    raw = {place: end + shift for place, end in ending.ends.items()}
    end = operations["end_ns"].to_numpy()
    what = operations["full_bytes"].astype(str) + " bytes of " + operations["dtype"].astype(str)
    kind = operations["kind"].astype(str)
    ran = pd.DataFrame(
        {
            "group": operations["group"].to_numpy().astype(np.int64),
            "seq": operations["seq"].to_numpy(),
            "kind": kind.to_numpy(),
            "start": operations["start_ns"].to_numpy(),
            "end": [max(raw.get(place, e), e) for place, e in zip(local.tolist(), end.tolist(), strict=True)] if raw else end,
            "match": operations["match"].to_numpy().astype(np.int64),
            "source": _peers(window, local, kind, "source_rank", "send", rank),
            "destination": _peers(window, local, kind, "destination_rank", "recv", rank),
            "what": np.where(kind.isin(_ALIKE) & (operations["full_bytes"] != NULL), what, ""),
            "site": [ending.sites.get(place, "") for place in local.tolist()] if ending.sites else "",
            "ran": True,
        }
    )
    of_group = [*job.groups.index[number], -1] if number < len(job.groups.index) else [-1]
    rows = [
        (of_group[call.group], call.seq, call.kind, call.called_ns + shift, call.called_ns + shift, -1, call.source, call.destination, "",
         call.site, False) for call in (ending.calls if ending.on_device else [])
    ]  # fmt: skip
    found = pd.concat([ran, pd.DataFrame(rows, columns=ran.columns).astype(ran.dtypes)], ignore_index=True) if rows else ran
    return found.assign(rank=rank)


def _peers(window: Window, local: Int64Array, kind: pd.Series[str], column: str, own: str, rank: int) -> Int64Array:
    found = window.operations[column].to_numpy()[local].copy()
    found[(kind == own).to_numpy() & (found == NULL)] = rank
    return np.asarray(found, np.int64)


def _numbers(job: Job, calls: pd.DataFrame) -> Int64Array:
    """The number of each call; of messages their place on the rank."""
    number = np.where(calls["p2p"], np.arange(len(calls)), calls["seq"].to_numpy())
    rest = ~calls["p2p"].to_numpy()
    without = (calls["seq"] == NULL).to_numpy() & rest
    first = job.matches["first_start_ns"].to_numpy()
    for group in np.unique(calls["group"].to_numpy()[without]).tolist():
        of_group = np.flatnonzero(rest & (calls["group"].to_numpy() == group))
        match = calls["match"].to_numpy()[of_group]
        used = np.unique(match[match >= 0])
        place = {int(one): n + 1 for n, one in enumerate(used[np.argsort(first[used], kind="stable")].tolist())}
        for rank in np.unique(calls["rank"].to_numpy()[of_group]).tolist():
            rows = of_group[calls["rank"].to_numpy()[of_group] == rank]
            number[rows] = _counted_on(calls["match"].to_numpy()[rows], place)
    return np.asarray(number, np.int64)


def _counted_on(match: Int64Array, place: Mapping[int, int]) -> Int64Array:
    """Numbers of one rank's calls in their order: those of matches, then counted on from the last of them."""
    number = np.array([place.get(one, NULL) for one in match.tolist()], np.int64)
    known = np.flatnonzero(number != NULL)
    behind = int(known[-1]) + 1 if len(known) else 0
    last = int(number[known].max()) if len(known) else len(place)
    number[behind:] = last + 1 + np.arange(len(number) - behind)
    return number


def dumps_of(job: Job, calls: pd.DataFrame, hung: Int64Array, ends: Mapping[int, tuple[int, int]]) -> tuple[list[Dump], list[Stacks]]:
    """What each rank's flight recorder would have held, the calls in rows ``hung`` not done; and the stacks at the end."""
    state = np.full(len(calls), DONE, np.int64)
    state[hung] = np.where(calls["ran"].to_numpy()[hung], STARTED, SCHEDULED)
    later = ~calls["ran"].to_numpy() & (state == DONE)
    matched = calls.loc[calls["p2p"] & (calls["match"] >= 0)].groupby("rank")["number"].max()
    answered = calls["p2p"] & (calls["number"] <= calls["rank"].map(matched).fillna(-1))
    calls = calls.assign(state=state)[~answered & ~later]
    last = max(end for _, end in ends.values())
    by_rank = dict(list(calls.groupby("rank")))
    dumps = [_dump(job, rank, window, by_rank.get(rank, calls[:0]), last - end) for rank, (window, end) in ends.items()]
    stacks = [found for rank, (window, _) in ends.items() if (found := _stacks(job.windows[window], rank)) is not None]
    return dumps, stacks


def _dump(job: Job, rank: int, window: int, calls: pd.DataFrame, before: int) -> Dump:
    members = {number: group.ranks for number, group in enumerate(job.groups.groups) if group.ranks is None or rank in group.ranks}
    used = [*sorted({*members, *calls["group"].tolist()} - {-1}), -1]
    groups = [GroupInfo(job.groups[n].name, job.groups[n].description, job.groups[n].ranks) for n in used[:-1]]
    groups.append(GroupInfo("", NOT_RECORDED, None))
    texts: dict[str, int] = {"": 0}

    def coded(column: str) -> Int64Array:
        return np.array([texts.setdefault(text, len(texts)) for text in calls[column].tolist()], np.int64)

    places = {number: {member: n for n, member in enumerate(sorted(ranks or ()))} for number, ranks in members.items()}

    def within(column: str) -> Int64Array:
        rows = zip(calls["group"].tolist(), calls[column].tolist(), calls["p2p"].tolist(), strict=True)
        return np.array([places.get(group, {}).get(peer, peer) if p2p and peer != NULL else -1 for group, peer, p2p in rows], np.int64)

    group = np.array([used.index(number) for number in calls["group"].tolist()], np.int64)
    seq = np.where(calls["p2p"], -1, calls["number"]).astype(np.int64)
    state, start = calls["state"].to_numpy().astype(np.int8), calls["start"].to_numpy().astype(np.int64)
    columns = Calls(
        group, coded("kind"), seq, within("source"), within("destination"), state, start, coded("what"), coded("site")
    )  # fmt: skip
    file = job.windows[window].coverage.file
    return Dump(file, rank, FROM_TRACE, groups, list(texts), columns, {}, {}, ending=_ends_before(job.windows[window], before))


def _ends_before(window: Window, before: int) -> str:
    """What there is to say of a trace that ends before the others do."""
    if window.coverage.status == "truncated":
        return "its trace ends in the middle of the file"
    length = max(1, window.span[1] - window.span[0])
    return f"its trace ends {format_ns(before)} before the last one" if before > max(0.1 * length, 1_000_000) else ""


def _stacks(window: Window, rank: int) -> Stacks | None:
    ending = window.ending
    frames = [frame for frame in ending.stack if not frame.name.startswith("ProfilerStep")] if ending is not None else []
    return Stacks(window.coverage.file, rank, [frames]) if frames else None
