"""One file of what is left of a job that hangs, by its content."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tracekit.readers.flight_recorder import read_dump
from tracekit.readers.hang_files import Content, HangFile, content_of
from tracekit.readers.nccl_log import read_nccl_log
from tracekit.readers.python_stacks import read_stacks
from tracekit.readers.ras import read_ras_json
from tracekit.readers.recognise import read_errors
from tracekit.readers.sources import Source

_READERS: Mapping[Content, Callable[[Source], HangFile]] = {
    "flight_recorder": read_dump,
    "stacks": read_stacks,
    "nccl_log": read_nccl_log,
    "ras_json": read_ras_json,
}


def read_hang_file(source: Source) -> HangFile | None:
    """What the file tells; None for a file of another content. Raises InputError for one that cannot be used."""
    try:
        content = content_of(source.open)
    except read_errors():
        return None  # whoever reads it next says why
    return None if content is None else _READERS[content](source)
