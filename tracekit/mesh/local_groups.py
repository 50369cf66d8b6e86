"""Process groups as one rank's trace tells of them: in ``pg_config``, and in the arguments of its collectives."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tracekit.mesh.process_groups import DEFAULT_GROUP, LARGEST_WORLD, NO_DESCRIPTION, LocalGroup, same_description
from tracekit.notes import Note, note
from tracekit.trace.events import Int32Array, Int64Array, RankTables
from tracekit.units import NULL

#: torch writes at most this many members of a group as text.
TORCH_CUTS_AT = 30
#: A rank is in some hundred groups at most; a trace that tells of more than this is broken, and the rest is left out.
MOST_GROUPS = 4096
#: Members of all rank lists of one trace that are built rather than read.
_MOST_BUILT = 4 * LARGEST_WORLD
#: Collective names of records that move nothing.
_MOVES_NOTHING = ("wait", "init", "pg_init", "split", "abort")
#: A list of ranks below LARGEST_WORLD as torch writes it; Python's int() takes more than digits.
_PLAIN = re.compile(r"[0-9]{1,6}(?:, ?[0-9]{1,6})*")
_TEXTS = ("Process Group Name", "Process Group Description", "Process Group Ranks")
_NUMBERS = ("Process Group ID", "Group size", "Global rank start", "Global rank stride")


def local_groups(tables: RankTables) -> tuple[list[LocalGroup], Int32Array]:
    """Groups this rank tells of, and the group of each row of ``tables.side["communication"]`` (-1: none recorded).

    Mentions of one group are put together: a list that one mention cuts is taken whole from another, or rebuilt from start, stride and size
    where those agree with what is visible. What stays unknown is noted in ``tables.coverage``.
    """
    infos = _infos(tables)
    world = _World.of(infos)
    found = _Found(world)
    for info in infos:
        entries = info.get("pg_config")
        listed = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
        for entry in listed:
            found.add(_configured(entry, world))
        counted = _integer(info.get("pg_count"), len(listed))
        if listed and counted != len(listed):
            world.notes.append(note("pg_count_differs", counted, listed=len(listed)))
    configured = len(found.groups)
    mentions, inverse = _mentions(tables, world)
    indices = [-1 if mention is None else found.add(mention) for mention in mentions]
    if configured and len(found.groups) > configured:
        unlisted = tuple(_label(group) for group in found.groups[configured:])
        world.notes.append(note("groups_not_listed", len(unlisted), groups=unlisted))
    for seen in [*world.notes, *_unknown(found.groups)]:
        tables.coverage.note(seen)
    groups = [LocalGroup(g.name, g.description, g.ranks, g.size, g.known if g.ranks is None else (), g.backend) for g in found.groups]
    return groups, np.array([*indices, -1], np.int32)[inverse]


@dataclass(frozen=True)
class _Mention:
    """What one entry of ``pg_config``, or the arguments of a collective, say of a group. ``known`` are the readable members."""

    name: str
    description: str
    ranks: tuple[int, ...] | None
    known: tuple[int, ...]
    size: int
    backend: str = ""
    named: bool = True  # False: the name is only a number of torch 2.3 that most often equals it, or there is none


@dataclass
class _World:
    """What the trace says of the whole job (0 and -1: nothing), the lists built so far, and notes."""

    size: int
    own: int
    built: dict[tuple[int, int, int], tuple[int, ...]] = field(default_factory=dict)
    members: int = 0
    notes: list[Note] = field(default_factory=list)

    @classmethod
    def of(cls, infos: Sequence[dict[str, Any]]) -> _World:
        """From every ``distributedInfo`` of the file; one that is told twice and differently is not known."""
        sizes = {_size(info.get("world_size")) for info in infos} - {0}
        ranks = {_integer(info.get("rank"), -1) for info in infos} - {-1}
        return cls(sizes.pop() if len(sizes) == 1 else 0, ranks.pop() if len(ranks) == 1 else -1)

    def list_of(self, start: int, stride: int, size: int) -> tuple[int, ...] | None:
        """``size`` ranks from ``start`` at distance ``stride``; None for a list that no job has, or one too many for memory."""
        last = start + stride * (size - 1)
        if not 0 <= start <= last < (self.size or LARGEST_WORLD) or size > LARGEST_WORLD:
            return None
        key = (start, stride, size)
        if key not in self.built:
            if self.members + size > _MOST_BUILT:
                return None
            self.members += size
            self.built[key] = tuple(range(start, last + 1, max(1, stride)))
        return self.built[key]


def _infos(tables: RankTables) -> list[dict[str, Any]]:
    """Every ``distributedInfo``: mostly one or none; a file that repeats the key has them all under a name of the reader's."""
    repeated = tables.metadata.get("_distributedInfo_all")
    infos = repeated if isinstance(repeated, list) else [tables.metadata.get("distributedInfo")]
    return [info for info in infos if isinstance(info, dict)]


def _integer(value: Any, default: int) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return default
    return number if abs(number) < 2**31 else default


def _size(value: Any) -> int:
    """A number of ranks; 0 for one that no job has."""
    number = _integer(value, 0)
    return number if 0 < number <= LARGEST_WORLD else 0


def _configured(entry: dict[str, Any], world: _World) -> _Mention:
    listed = entry.get("ranks")
    ranks, known = parse_ranks(listed)
    size = _size(entry.get("pg_size"))
    if ranks == () and size in (0, world.size):
        size = world.size  # an empty list stands for the whole world
    mention = _Mention(_text(entry.get("pg_name")), _text(entry.get("pg_desc")), ranks, known, size, _text(entry.get("backend_config")))
    return _checked(mention, world)


def _text(value: Any) -> str:
    return str(value) if isinstance(value, str | int) else ""


def parse_ranks(value: Any) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
    """(whole list or None, readable members) of a rank list: a JSON list or text such as ``[0, 1, ..., 29, ...]`` that may be cut."""
    if (plain := _plain_ranks(value)) is not None:
        return plain, plain
    if isinstance(value, list):
        items = [str(v) if isinstance(v, str | int) else "" for v in value[: LARGEST_WORLD + 1]]
    elif isinstance(value, str):
        text = value.strip().removeprefix("[").removesuffix("]").rstrip(", ")
        items = [part.strip() for part in text.split(",", LARGEST_WORLD)] if text else []
    else:
        return None, ()
    known: list[int] = []
    for item in items:
        if not (item.isascii() and item.isdigit() and len(item) <= 7 and int(item) < LARGEST_WORLD):
            break
        known.append(int(item))
    whole = len(known) == len(items) <= LARGEST_WORLD
    if len(set(known)) != len(known):
        return None, ()  # a rank is in a group once: the list is not one
    return (tuple(known) if whole else None), tuple(known)


def _plain_ranks(value: Any) -> tuple[int, ...] | None:
    """The list as nearly every trace has it: whole, of different numbers that can be ranks; None for any other."""
    if isinstance(value, str):
        text = value.strip().removeprefix("[").removesuffix("]")
        value = [int(part) for part in text.split(",")] if _PLAIN.fullmatch(text) else None
    if not isinstance(value, list) or not value or len(value) > LARGEST_WORLD or set(map(type, value)) != {int}:
        return None
    usable = min(value) >= 0 and max(value) < LARGEST_WORLD and len(set(value)) == len(value)
    return tuple(value) if usable else None


def _mentions(tables: RankTables, world: _World) -> tuple[list[_Mention | None], Int64Array]:
    """The distinct mentions among the arguments of collectives, and which of them each row is (one past the end: none)."""
    side = tables.side["communication"]
    if not len(side):
        return [], np.empty(0, np.int64)
    columns = [side.columns[name].astype(np.int64) for name in (*_TEXTS, *_NUMBERS)]
    # Records of waits name their group and call it a group of one: what moves nothing says nothing of who is in a group.
    silent = tables.each_text(side.columns["Collective name"], lambda text: text in _MOVES_NOTHING)
    columns = [np.where(silent, 0 if index < len(_TEXTS) else NULL, column) for index, column in enumerate(columns)]
    combined = np.zeros(len(side), np.int64)
    for column in columns:  # the combination so far and the next column, both counted from 0: their product fits
        values, codes = np.unique(column, return_inverse=True)
        combined = np.unique(combined * len(values) + codes, return_inverse=True)[1].astype(np.int64)
    _, first = np.unique(combined, return_index=True)
    if len(first) > MOST_GROUPS:
        world.notes.append(note("too_many_groups", len(first), limit=MOST_GROUPS))
        first = first[:MOST_GROUPS]
    rows = zip(*(column[first].tolist() for column in columns), strict=True)
    return [_mention(tables, world, *row) for row in rows], np.minimum(combined, len(first))


def _mention(
    tables: RankTables, world: _World, name: int, described: int, listed: int, number: int, size: int, start: int, stride: int
) -> _Mention | None:
    """From one combination of string codes and numbers; None where it names no group and no members."""
    ranks, known = parse_ranks(tables.text(listed)) if listed > 0 else (None, ())
    text = tables.text(name) or ("" if number == NULL else str(number))
    if not text and not known and NULL in (start, stride):
        return None
    mention = _Mention(text, tables.text(described), ranks, known, _size(size), named=bool(tables.text(name)))
    if not known and size == world.size > 0 and start == 0 and stride == 1:
        mention = replace(mention, ranks=world.list_of(0, 1, world.size))
    elif not mention.ranks and mention.size:
        mention = replace(mention, ranks=_rebuilt(mention, start, stride, world))
    mention = _checked(mention, world)
    return mention if text or mention.known else None


def _rebuilt(mention: _Mention, start: int, stride: int, world: _World) -> tuple[int, ...] | None:
    """The members by start, stride and size, where that agrees with all that is known.

    torch writes start 0 and stride 1 also where it was not told the members, and stride -1 where they are irregular. So 0 and 1 count for
    nothing unless the first members are there to confirm it.
    """
    if NULL in (start, stride) or (stride < 1 and mention.size > 1):
        return None
    if not mention.known and ((start, stride) == (0, 1) or mention.size == 1):
        return None
    ranks = world.list_of(start, stride, mention.size)
    if ranks is None or ranks[: len(mention.known)] != mention.known:
        return None
    return ranks if mention.known or world.own < 0 or world.own in ranks else None


def _checked(mention: _Mention, world: _World) -> _Mention:
    """The mention with members and size that agree: a list cut without a sign is no whole list, a whole list decides the size."""
    ranks, size = mention.ranks or None, mention.size
    if ranks is not None and len(ranks) == TORCH_CUTS_AT < size:
        ranks = None
    if ranks is None and size > 0 and size == world.size and all(rank < size for rank in mention.known):
        ranks = world.list_of(0, 1, size)  # as many members as there are ranks
    if ranks is None and mention.description == DEFAULT_GROUP and not size and world.size:
        ranks = world.list_of(0, 1, world.size)
    if ranks is None:
        size = size if size >= len(mention.known) else 0
        return replace(mention, ranks=None, size=size)
    if size and size != len(ranks):
        world.notes.append(note("group_size_differs", len(ranks), group=(_label(mention),), size=size))
    return replace(mention, ranks=ranks, known=ranks, size=len(ranks))


def _label(mention: _Mention) -> str:
    described = mention.description not in (*NO_DESCRIPTION, DEFAULT_GROUP)
    return mention.description if described else mention.name or mention.description or "without a name"


class _Found:
    """The groups found so far, each with all that its mentions say."""

    def __init__(self, world: _World) -> None:
        self.groups: list[_Mention] = []
        self.by_name: dict[str, list[int]] = {}
        self.world = world

    def add(self, mention: _Mention) -> int:
        """Index of the group that this mention belongs to; a new one where none fits; -1 where there are too many."""
        position = self._fitting(mention)
        if position >= 0:
            self.groups[position] = _merged(self.groups[position], mention)
            return position
        if len(self.groups) >= MOST_GROUPS:
            self.world.notes.append(note("groups_left_out", MOST_GROUPS))
            return -1
        self.groups.append(mention)
        self.by_name.setdefault(mention.name, []).append(len(self.groups) - 1)
        return len(self.groups) - 1

    def _fitting(self, mention: _Mention) -> int:
        for position in self.by_name.get(mention.name, []):
            if _same(self.groups[position], mention):
                return position
        if mention.named or mention.ranks is None:
            return -1
        alike = [i for i, group in enumerate(self.groups) if group.ranks == mention.ranks]
        alike = [i for i in alike if same_description(self.groups[i].description, mention.description)]
        return alike[0] if len(alike) == 1 else -1


def _same(a: _Mention, b: _Mention) -> bool:
    """Whether two mentions of one name can be of one group."""
    if (a.size and b.size and a.size != b.size) or not same_description(a.description, b.description):
        return False
    if a.ranks is not None and b.ranks is not None:
        return a.ranks == b.ranks
    shared = min(len(a.known), len(b.known))
    return a.known[:shared] == b.known[:shared]


def _merged(group: _Mention, mention: _Mention) -> _Mention:
    whole = group.ranks if group.ranks is not None else mention.ranks
    return replace(
        group,
        description=group.description if group.description not in NO_DESCRIPTION else mention.description or group.description,
        ranks=whole,
        known=whole if whole is not None else max(group.known, mention.known, key=len),
        size=group.size or mention.size,
    )


def _unknown(groups: Sequence[_Mention]) -> list[Note]:
    """Notes on groups whose members are not all recorded."""
    partial = [group for group in groups if group.ranks is None and group.size != 1 and (group.size or group.known)]
    notes = [note("members_not_recorded", len(g.known), group=(_label(g),), size=g.size or "an unknown number of") for g in partial[:8]]
    more = len(partial) - len(notes)
    return notes + ([note("more_members_not_recorded", more)] if more else [])
