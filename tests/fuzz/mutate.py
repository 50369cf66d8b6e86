"""Mutations that know the structure of their input: a tree of values changes in its keys, types and numbers, a text in its bytes."""

from __future__ import annotations

import copy
import random
from typing import Any

#: What stands where it should not: borders of types, text that means something to somebody, nothing at all.
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 10**30, 0.5, -0.0, 1e300, -1e-300,
    "", " ", "0", "-1", "1e999", "nan", "\u0000", "\ud7ff\ufffd", "<b>&", "../../etc/passwd", "a" * 5000, "[" * 200, [], {}, [[]], [{}],
    [0] * 100, {"": None}, {"rank": {"rank": {}}},
]  # fmt: skip


def tree(value: Any, chance: random.Random, changes: int = 3) -> Any:
    """A copy with up to ``changes`` places changed: replaced, dropped, doubled, swapped with another, or put into a list."""
    result = copy.deepcopy(value)
    for _ in range(chance.randint(1, changes)):
        places = list(_places(result))
        if not places:
            return chance.choice(ODD)
        parent, key = chance.choice(places)
        _change(parent, key, chance, places)
    return result


def _change(parent: Any, key: Any, chance: random.Random, places: list[tuple[Any, Any]]) -> None:
    way = chance.randrange(6)
    if way == 0:
        del parent[key]
    elif way == 1 and isinstance(parent, list):
        parent.insert(key, copy.deepcopy(parent[key]))
    elif way == 2:
        other, place = chance.choice(places)
        parent[key] = copy.deepcopy(other[place]) if _has(other, place) else None
    elif way == 3:
        parent[key] = [parent[key]]
    elif way == 4 and isinstance(parent[key], int | float) and not isinstance(parent[key], bool):
        parent[key] = parent[key] * chance.choice([-1, 0, 2, 1000, 10**9, 10**18]) + chance.choice([-1, 0, 1])
    else:
        parent[key] = copy.deepcopy(chance.choice(ODD))


def _has(parent: Any, key: Any) -> bool:
    return key in parent if isinstance(parent, dict) else 0 <= key < len(parent)


def _places(value: Any) -> Any:
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


def text(data: bytes, chance: random.Random, changes: int = 4) -> bytes:
    """A copy with some bytes changed, a stretch cut, doubled or moved, or the end lost."""
    result = bytearray(data)
    for _ in range(chance.randint(1, changes)):
        if not result:
            break
        at = chance.randrange(len(result))
        length = chance.choice([1, 1, 2, 8, 64])
        way = chance.randrange(5)
        if way == 0:
            result[at] = chance.randrange(256)
        elif way == 1:
            del result[at : at + length]
        elif way == 2:
            result[at:at] = result[at : at + length]
        elif way == 3:
            result[at:at] = chance.choice([b"\0", b'"', b"\\", b"{", b"[", b"]}", b"\xff\xfe", b"1e9999", b",,", b"\x1f\x8b\x08"])
        elif chance.random() < 0.3:
            del result[at:]
    return bytes(result)
