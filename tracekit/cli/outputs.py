"""Documents on their way to a file or to standard output."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any


def write_json(file: str, document: Mapping[str, Any] | Sequence[Any]) -> None:
    """Write a document as indented JSON; ``-`` is standard output. Raises OSError."""
    from tracekit.report.encoding import encode

    write_bytes(file, encode(document, indent=1) + b"\n")


def write_bytes(file: str, data: bytes) -> None:
    """Write bytes so that nobody sees half of the file; ``-`` is standard output. Raises OSError."""
    from tracekit.files import write_atomically

    if file == "-":
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    else:
        write_atomically(file, [data])
