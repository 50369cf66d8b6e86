"""Clocks of different hosts, brought together through the collectives that all of them left at the same moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Clock:
    """``offset_ns[rank]`` is what the rank's clock is ahead of the first rank's: aligned time = own time - offset.

    ``residual_ns`` is the largest contradiction that remains ("latest start <= earliest end" of a matched collective),
    0 when there is none, ``None`` where nothing could be compared. ``aligned``: all ranks share one time line (one
    host, or enough matched collectives).
    """

    aligned: bool
    offset_ns: Mapping[int, int]
    residual_ns: int | None
    note: str = ""
