"""Process groups as one rank's trace tells of them: in ``pg_config``, and in the arguments of its collectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tracekit.mesh.process_groups import LARGEST_WORLD, NO_DESCRIPTION, LocalGroup
from tracekit.trace.events import Int32Array, Int64Array, RankTables
from tracekit.units import NULL


@dataclass(frozen=True)
class _Draft:
    """One mention of a group: in ``pg_config``, or in the arguments of a collective."""

    name: str
    description: str
    ranks: tuple[int, ...] | None
    known: tuple[int, ...]
    size: int
    start: int = NULL
    stride: int = NULL
    backend: str = ""


def local_groups(tables: RankTables) -> tuple[list[LocalGroup], Int32Array]:
    """Groups this rank tells of, and the group of each row of ``tables.side["communication"]`` (-1: none recorded).

    Mentions of one group are put together: a list that one mention cuts is taken whole from another, or rebuilt from start, stride and size
    where those agree with what is visible. What stays unknown is noted in ``tables.coverage``.
    """
    world_size, own = _world(tables)
    groups: list[_Draft] = []
    for entry in _configured(tables, world_size):
        _place(groups, entry)
    mentions, inverse = _mentions(tables)
    places = [-1 if draft is None else _place(groups, draft) for draft in mentions]
    finished = [_finished(draft, world_size, own) for draft in groups]
    for group in finished:
        if group.ranks is None and group.size != 1 and (group.known or group.size):
            label = group.description if group.description not in NO_DESCRIPTION else group.name
            tables.coverage.note(f"process group {label}: only {len(group.known)} of {group.size or 'unknown'} members are recorded")
    return finished, np.array([*places, -1], np.int32)[inverse]


def _world(tables: RankTables) -> tuple[int, int]:
    info = tables.metadata.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    return _integer(info.get("world_size"), 0), _integer(info.get("rank"), -1)


def _integer(value: Any, default: int) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return default
    return number if abs(number) < 2**31 else default


def _configured(tables: RankTables, world_size: int) -> list[_Draft]:
    info = tables.metadata.get("distributedInfo")
    entries = info.get("pg_config") if isinstance(info, dict) else None
    drafts = []
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict):
            size = _integer(entry.get("pg_size"), 0)
            ranks, known = parse_ranks(entry.get("ranks"))
            if ranks == () and world_size and size in (0, world_size) and world_size <= LARGEST_WORLD:
                ranks = known = tuple(range(world_size))  # an empty list stands for the whole world
            elif ranks == ():
                ranks = None
            drafts.append(
                _Draft(
                    str(entry.get("pg_name", "")),
                    str(entry.get("pg_desc", "")),
                    ranks,
                    known,
                    size or len(ranks or ()),
                    backend=str(entry.get("backend_config", "")),
                )
            )
    counted = _integer(info.get("pg_count"), len(drafts)) if isinstance(info, dict) else len(drafts)
    if drafts and counted != len(drafts):
        tables.coverage.note(f"pg_count says {counted} process groups, {len(drafts)} are listed: the listed ones are used")
    return drafts


def parse_ranks(value: Any) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
    """(whole list or None, readable members) of a rank list: a JSON list or text such as ``[0, 1, ..., 29, ...]`` that may be cut."""
    if isinstance(value, list):
        items = [str(v) for v in value[:LARGEST_WORLD]]
    elif isinstance(value, str):
        items = [part.strip() for part in value[: 12 * LARGEST_WORLD].strip().strip("[]()").split(",") if part.strip()]
    else:
        return None, ()
    known: list[int] = []
    for item in items:
        if not item.isascii() or not item.isdigit() or len(item) > 9:
            break
        known.append(int(item))
    whole = len(known) == len(items) and len(set(known)) == len(known)
    return (tuple(known) if whole else None), tuple(known)


def _mentions(tables: RankTables) -> tuple[list[_Draft | None], Int64Array]:
    """The distinct mentions among the arguments of collectives, and which of them each row is."""
    side = tables.side["communication"]
    names = ("Process Group Name", "Process Group ID", "Process Group Description", "Process Group Ranks")
    numbers = ("Group size", "Global rank start", "Global rank stride")
    if not len(side):
        return [], np.empty(0, np.int64)
    stack = np.stack([side.columns[c].astype(np.int64) for c in (*names, *numbers)], axis=1)
    distinct, inverse = np.unique(stack, axis=0, return_inverse=True)
    return [_mention(tables, *row) for row in distinct.tolist()], inverse.reshape(-1).astype(np.int64)


def _mention(tables: RankTables, name: int, number: int, description: int, ranks: int, size: int, start: int, stride: int) -> _Draft | None:
    text = tables.text(name) if name > 0 else ("" if number == NULL else str(number))
    whole, known = parse_ranks(tables.text(ranks)) if ranks > 0 else (None, ())
    if whole == ():
        whole = None
    if not text and not known and start == NULL:
        return None
    if whole is not None and size > 0 and size != len(whole):
        whole = None  # the list and the size contradict each other
    size = size if size > 0 else len(whole or ())
    return _Draft(text, tables.text(description), whole, known, size, start, stride)


def _place(groups: list[_Draft], draft: _Draft) -> int:
    """Index of the group that this mention belongs to; a new one where none fits. The stored group learns from the mention."""
    for index, group in enumerate(groups):
        if _same(group, draft):
            groups[index] = _Draft(
                group.name or draft.name,
                group.description if group.description not in NO_DESCRIPTION else draft.description or group.description,
                group.ranks if group.ranks is not None else draft.ranks,
                max(group.known, draft.known, key=len),
                group.size or draft.size,
                group.start if group.start != NULL else draft.start,
                group.stride if group.stride != NULL else draft.stride,
                group.backend,
            )
            return index
    groups.append(draft)
    return len(groups) - 1


def _same(a: _Draft, b: _Draft) -> bool:
    if a.name != b.name or (a.size and b.size and a.size != b.size):
        return False
    known = [d for d in (a.description, b.description) if d not in NO_DESCRIPTION]
    if len(known) == 2 and known[0] != known[1]:
        return False
    shared = min(len(a.known), len(b.known))
    return a.known[:shared] == b.known[:shared]


def _finished(draft: _Draft, world_size: int, own: int) -> LocalGroup:
    ranks = draft.ranks
    if ranks is None and 0 < draft.size <= LARGEST_WORLD:
        ranks = _rebuilt(draft, world_size, own)
    known = ranks if ranks is not None else draft.known
    return LocalGroup(draft.name, draft.description, ranks, draft.size or len(known), known if ranks is None else (), draft.backend)


def _rebuilt(draft: _Draft, world_size: int, own: int) -> tuple[int, ...] | None:
    """The members by start, stride and size, if that agrees with every member that is visible (and with this rank being one)."""
    if draft.description == "default_pg" and draft.size == world_size:
        return tuple(range(world_size))
    if draft.start == NULL or draft.stride == NULL or draft.start < 0 or (draft.stride < 1 and draft.size > 1):
        return None
    last = draft.start + draft.stride * (draft.size - 1)
    if last > LARGEST_WORLD or (world_size and last >= world_size):
        return None
    ranks = tuple(range(draft.start, last + 1, max(1, draft.stride)))
    if draft.known:
        return ranks if ranks[: len(draft.known)] == draft.known else None
    return ranks if own in ranks else None
