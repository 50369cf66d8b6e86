"""A Kineto trace file to RankTables: any layout, any packing, exact times, everything odd counted."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np

from tracekit.errors import InputError
from tracekit.notes import note, text_note
from tracekit.readers import oddities, tolerant
from tracekit.readers.compressed import BOM
from tracekit.readers.sources import Source, clean
from tracekit.trace.events import Category, Coverage, RankTables
from tracekit.units import listed, plural

if TYPE_CHECKING:
    from tracekit.readers.assembly import Assembly
    from tracekit.readers.stream import StreamSummary

#: Events that say nothing of the program: names of threads, the profiler's own span and its instants.
_NOTHING_HAPPENED = [int(c) for c in (Category.METADATA, Category.TRACE, Category.OTHER)]
#: Behind the end of one JSON document another one.
_ANOTHER = re.compile(rb'\}\s*\{\s*"[^"]{0,64}"\s*:|\}\s*\[\s*\{')
_ANEW = "profile again, or copy the file anew"
_REMEDY = "give a trace written by torch.profiler (export_chrome_trace or tensorboard_trace_handler)"


def read_trace(
    source: Source,
    *,
    threads: int = 2,
    progress: Callable[[int], None] | None = None,
    chunk: int | None = None,
    most_rows: int | None = None,
) -> RankTables:
    """Tables of one trace file; repairs and losses are noted in ``coverage``.

    ``progress`` gets the number of stored bytes read since its last call. Of a file of more than ``most_rows`` events the first part (by
    time) is kept, and ``kept_until`` says how far. Raises InputError when nothing of the file can be used.
    """
    from tracekit.readers import stream
    from tracekit.readers.assembly import Assembly
    from tracekit.readers.compressed import TextStream
    from tracekit.readers.entry import entries
    from tracekit.readers.keys import Spec
    from tracekit.readers.recognise import read_errors, reason
    from tracekit.readers.worker import Worker

    size = stream.CHUNK if chunk is None else chunk
    spec = Spec()
    workers = [Worker(spec, size) for _ in range(max(1, threads))]
    assembly = Assembly(workers, most_rows)
    try:
        with source.open() as raw, closing(TextStream(raw, progress)) as text:
            events = stream.EventStream(text, workers, size)
            for worker, block in events.blocks():
                assembly.add(worker, block)
    except read_errors() as error:
        raise InputError(f"{clean(source.name)}: cannot be read ({reason(error)})", "check the file and its permissions") from error
    coverage = Coverage(source.url)
    _refuse_useless(source, events.summary, text.damage, len(assembly))
    metadata, problems = tolerant.parse_metadata(events.summary.head, events.summary.tail)
    for problem in problems:
        coverage.note(text_note(problem), "repaired")
    tables = assembly.finish(metadata, coverage)
    _note(coverage, events.summary, text.damage, assembly)
    oddities.settle(tables)
    if entries().problem:
        coverage.note(text_note(entries().problem))
    _refuse_idle(source, tables)
    _refuse_fused(source, tables)
    if events.summary.bare_list:
        _read_as_autograd(tables)
    return tables


def warm_up() -> None:
    """Compile the reader (some seconds, once a machine) so that the first trace does not wait for it."""
    from tracekit.readers.entry import entries

    entries()


def _refuse_useless(source: Source, summary: StreamSummary, damage: str, rows: int) -> None:
    """InputError, one line, for a file of which nothing can be used."""
    name = clean(source.name)
    text = summary.head.removeprefix(BOM).strip(b" \t\r\n\x00")
    if summary.bytes_read == 0 and damage:
        raise InputError(f"{name} is damaged: {damage}", _ANEW)
    if text in (b"", b"{}"):
        raise InputError(f"{name} is empty: it holds no events", _ANEW)
    if encoding := _wide(summary.head):
        raise InputError(f"{name} is written as {encoding}, traces are UTF-8", f"convert it: iconv -f {encoding} -t UTF-8")
    if text[:1] not in (b"{", b"["):
        raise InputError(f"{name} is not a trace (neither JSON nor packed JSON)", _REMEDY)
    if rows:
        return
    if summary.head_is_cut or (summary.found and summary.truncated):
        raise InputError(f"{name} holds no events: it is truncated before its first event", _ANEW)
    if summary.found and not summary.bare_list:
        raise InputError(f"{name} holds no events", "profile at least one active step")
    raise InputError(f"{name} holds no events (JSON without a list traceEvents)", _REMEDY)


def _wide(head: bytes) -> str:
    """UTF-16 or UTF-32 if a text begins as these do, with their mark or with every second byte (three of four) 0; else ''."""
    if head[:4] in (b"\xff\xfe\0\0", b"\0\0\xfe\xff") or (len(head) > 7 and head[:4].count(0) == 3 == head[4:8].count(0)):
        return "UTF-32"
    halves = len(head) > 7 and (not any(head[0:8:2]) or not any(head[1:8:2])) and any(head[:8])
    return "UTF-16" if head[:2] in (b"\xff\xfe", b"\xfe\xff") or halves else ""


def _refuse_idle(source: Source, tables: RankTables) -> None:
    """InputError for a trace that says nothing of the program."""
    if (tables.phase == ord("X")).any() or not np.isin(tables.category, _NOTHING_HAPPENED).all():
        return
    name = clean(source.name)
    if not tables.phase.any():
        raise InputError(f"{name} holds no events (JSON of something else)", _REMEDY)
    cut = ": it is truncated behind them" if tables.coverage.status == "truncated" else ""
    raise InputError(f"{name} holds no events, only their metadata{cut}", _ANEW if cut else "profile at least one active step")


def refuse_foreign(source: Source, tables: RankTables) -> None:
    """InputError for events of another program: none of a kind that a profiler of PyTorch writes, none of a device."""
    if not np.isin(tables.category, _NOTHING_HAPPENED).all() or len(oddities.unread(tables)):
        return
    complete = np.flatnonzero(tables.phase == ord("X"))
    names = listed([clean(tables.text(int(code))) for code in np.unique(tables.name[complete])[:3]], 3)
    verb = "is" if len(complete) == 1 else "are"
    what = f"the {plural(len(complete), 'event')} in it {verb} of another program ({names})"
    raise InputError(f"{clean(source.name)} holds no operator, kernel or annotation: {what}", _REMEDY)


def _refuse_fused(source: Source, tables: RankTables) -> None:
    """InputError for a file of several ranks: their work must not be taken for one rank's."""
    found = oddities.processes(tables)
    if found:
        names = listed([clean(name) for name in found], 4)
        raise InputError(f"{clean(source.name)} holds several processes ({names}), not one rank", "give each rank a file of its own")


def _note(coverage: Coverage, summary: StreamSummary, damage: str, assembly: Assembly) -> None:
    arrows, commas, twice, bad_times = (int(n) for n in summary.counts)
    coverage.arrows = arrows
    repairs = dict(summary.repairs)
    cut = repairs.pop("truncated", 0)
    for sentence in tolerant.sentences(repairs):
        coverage.note(text_note(sentence), "repaired")
    if commas:
        coverage.note(note("trailing_commas", commas), "repaired")
    if twice:
        coverage.note(note("keys_twice", twice), "repaired")
    if bad_times:
        coverage.note(note("times_no_numbers", bad_times), "repaired")
    for key in ("utf8", "literal"):
        if assembly.odd_strings[key]:
            coverage.note(text_note(tolerant.sentence(key, assembly.odd_strings[key])), "repaired")
    if _ANOTHER.search(summary.tail):
        coverage.note(note("second_document"), "repaired")
    if summary.gave_up:
        coverage.note(text_note(summary.gave_up), "truncated")
    elif summary.truncated or cut:
        coverage.note(note("truncated", coverage.events + coverage.arrows, damage=damage), "truncated")
    elif damage:
        coverage.note(note("damage_behind", damage=damage), "repaired")


def _read_as_autograd(tables: RankTables) -> None:
    """A bare list may be the old autograd profiler's export: no categories, a process called 'CPU functions'."""
    functions = np.array([str(lane.pid).startswith("CPU functions") for lane in tables.lanes], np.bool_)
    if not functions.any():
        return
    rows = functions[tables.lane] & (tables.category == Category.OTHER)
    tables.category[rows] = Category.OPERATOR
    tables.forget()
    tables.coverage.note(note("autograd_export"))
