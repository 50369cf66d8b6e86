"""Documents as bytes."""

from __future__ import annotations

from typing import Any

import msgspec


def encode(value: Any, *, indent: int = 0) -> bytes:
    """UTF-8 JSON of a cleaned value; 0 is compact."""
    data = msgspec.json.encode(value)
    return msgspec.json.format(data, indent=indent) if indent else data
