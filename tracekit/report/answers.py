"""The whole answer to one question, kept: the same question on the same files is answered again without reading or computing anything.

An answer is good for all files that were found (what each file's window depends on, and when its place in the file system last changed),
those that were passed over, every option that the result depends on, and one state of tracekit's own code. It is believed only in a folder
that nobody else can write (``cache_folder.distrust``). Nothing here imports more than reading it back needs.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tracekit.job.options import LoadOptions
from tracekit.readers.cache_folder import distrust, read_entry, write_entry
from tracekit.readers.sources import Found, Source
from tracekit.readers.state import of_code, of_source
from tracekit.report.cells import Preview
from tracekit.report.encoding import encode
from tracekit.report.plotly_code import plotly_element

_ENDING = ".answer"
_MAGIC = b"TRKANSW1"
#: By measurement on a report of 1.5 MB: 0.2 of its size in 8 ms; higher levels save a tenth of that for three times the time.
_LEVEL = 1
_MOST_BYTES = 1 << 30  # unpacked
#: Options of which the result depends; the others say how it is reached.
_MATTER = ("mesh", "gpus_per_node", "ranks", "steps", "named", "run")


@dataclass(frozen=True)
class Answer:
    """The JSON document; the report in pieces, None where none was asked for; what a terminal shows of tables."""

    document: dict[str, Any]
    page: list[bytes] | None
    previews: list[Preview]


class _Stored(msgspec.Struct):
    """``page``: None in it stands for plotly's code, which is most of a page and the same in all."""

    document: bytes
    page: list[bytes | None] | None
    previews: list[Preview]


def place(found: Found, options: LoadOptions, asked: Sequence[object]) -> Path | None:
    """Where the answer is kept; None where nothing is, or where a change of a file would not be noticed.

    ``asked``: what else the answer depends on.
    """
    if options.cache is None or distrust(options.cache):
        return None
    states = [_state(source) for source in found.sources]
    if None in states:
        return None
    skipped = [(entry.file, entry.problems) for entry in found.skipped]
    settings = [sorted(value) if isinstance(value, frozenset) else value for value in (getattr(options, name) for name in _MATTER)]
    facts = json.dumps([states, skipped, settings, list(asked), of_code()], default=str)
    return Path(options.cache) / (hashlib.sha256(facts.encode(errors="replace")).hexdigest()[:40] + _ENDING)


def _state(source: Source) -> list[object] | None:
    """Also with the time of the last change of its name, owner and permissions: a file that may be read now is read."""
    state = of_source(source)
    try:
        return None if state is None else [*state, os.stat(source.url).st_ctime_ns]  # noqa: PTH116 - thousands of files
    except (OSError, ValueError):
        return None


def load(path: Path, with_page: bool) -> Answer | None:
    """An answer as it was stored, with its page where that is wanted; None where there is none."""
    body = read_entry(path, _MAGIC)
    if body is None:
        return None
    import zstandard

    try:
        data = zstandard.ZstdDecompressor().decompress(body, max_output_size=_MOST_BYTES)
        stored = msgspec.msgpack.decode(data, type=_Stored)
        document = msgspec.json.decode(stored.document)
    except (zstandard.ZstdError, msgspec.MsgspecError, UnicodeDecodeError, MemoryError):
        return None
    if (with_page and stored.page is None) or not isinstance(document, dict):
        return None
    page = [plotly_element() if part is None else part for part in stored.page] if with_page and stored.page is not None else None
    return Answer(document, page, stored.previews)


def store(path: Path, answer: Answer) -> None:
    """Keep an answer for the next time, where that is possible."""
    import zstandard

    page = None if answer.page is None else [None if part is plotly_element() else part for part in answer.page]
    data = msgspec.msgpack.encode(_Stored(encode(answer.document), page, answer.previews))
    write_entry(path, _MAGIC, zstandard.ZstdCompressor(level=_LEVEL).compress(data))
