"""The recorder's manifest beside a trace: found by the trace's name, read whole, left out with a sentence where it cannot be used."""

from __future__ import annotations

import re

from tracekit.errors import InputError
from tracekit.manifest import MOST_BYTES, SUFFIX, Manifest, decode
from tracekit.readers.recognise import read_errors, reason
from tracekit.readers.sources import Source

_TRACE = re.compile(r"(?:(?:\.pt)?\.trace\.json(?:\.gz|\.zst)?|\.memory_snapshot\.pickle(?:\.gz)?)$")


def beside(source: Source) -> Source | None:
    """The manifest that would belong to a trace or snapshot; None for a name that the recorder does not give."""
    if not _TRACE.search(source.url):
        return None
    return Source(_TRACE.sub(SUFFIX, source.url), _TRACE.sub(SUFFIX, source.name), 0, 0)


def read_manifest(source: Source) -> tuple[Manifest | None, str]:
    """(the manifest of a trace, why there is none although there is a file); (None, '') where there is no file."""
    path = beside(source)
    if path is None:
        return None, ""
    try:
        with path.open() as file:
            data = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        return None, ""
    except read_errors() as error:
        return None, f"{path.name}: could not be read: {reason(error)}; the trace is read without it"
    if len(data) > MOST_BYTES:
        return None, f"{path.name}: is larger than {MOST_BYTES // 2**20} MiB and was not read; the trace is read without it"
    try:
        return decode(data, path.name), ""
    except InputError as error:
        return None, str(error)
