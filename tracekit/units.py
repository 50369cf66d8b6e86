"""Units and the one sentinel for "not recorded" in integer columns.

Time inside tracekit is int64 nanoseconds, exact; it becomes float microseconds only where it leaves (JSON, report).
Sizes are int64 bytes. A gigabyte is 10^9 bytes, as in nccl-tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

#: Missing value of every int64 column: no duration, size or identifier can be this number.
NULL = int(np.iinfo(np.int64).min)
#: Missing value of every int32 column.
NULL32 = int(np.iinfo(np.int32).min)

NS_PER_US = 1_000
NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000


def microseconds(ns: int | float | None) -> float | None:
    """Nanoseconds as float microseconds; ``None``, ``NULL`` and the mean of nothing (NaN) are ``None``."""
    return None if ns is None or ns == NULL or ns != ns else ns / NS_PER_US


def known(value: Any) -> Any:
    """A value for JSON: None for NULL and for NaN."""
    return None if value is None or value == NULL or value != value else value


#: What three digits round up to one of the next unit is told in that.
_ROUNDED = 0.9995


def format_ns(ns: int | float) -> str:
    """Nanoseconds for a reader: the unit follows the size (``812 us``, ``1.25 ms``, ``3.4 s``)."""
    size = abs(ns)
    for unit, scale in (("s", NS_PER_S), ("ms", NS_PER_MS), ("us", NS_PER_US)):
        if size >= _ROUNDED * scale:
            return f"{ns / scale:.3g} {unit}" if size < 1000 * scale else f"{ns / scale:.0f} {unit}"
    return f"{ns:.0f} ns"


def format_bytes(size: int | float) -> str:
    """Bytes for a reader, in powers of ten (``67.1 MB``)."""
    for unit, scale in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(size) >= _ROUNDED * scale:
            return f"{size / scale:.3g} {unit}" if abs(size) < 1000 * scale else f"{size / scale:.0f} {unit}"
    return f"{size:.0f} B"


def format_rate(gb_s: float) -> str:
    """Bandwidth for a reader (``47.1 GB/s``)."""
    return f"{gb_s:.3g} GB/s" if gb_s < 999.5 else f"{gb_s:,.0f} GB/s"


#: Characters of a name of the trace within a sentence.
LONGEST_NAME = 60


def listed(items: Sequence[object], limit: int = 6) -> str:
    """The first few for a reader, then how many there are (``0, 1, 2, ... (62 in all)``)."""
    text = ", ".join(str(item) for item in items[:limit])
    return f"{text}, ... ({len(items)} in all)" if len(items) > limit else text


def shortened(name: str) -> str:
    """A name that fits into a sentence."""
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 3] + "..."


def capitalized(text: str) -> str:
    """The text as a sentence begins: its first letter is a capital, the rest as it is."""
    return text[:1].upper() + text[1:]


def plural(count: int, one: str, many: str = "") -> str:
    """``1 rank``, ``3,200 ranks``."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"
