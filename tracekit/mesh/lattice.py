"""The shape of a rank list on a row-major mesh: by which strides its members go.

Members of one axis stand at a constant distance: [1, 3, 5, 7] has stride 2 and 4 members. A group over several axes that are not neighbours
has one level for each: [0, 1, 8, 9] is 2 at stride 1 and 2 at stride 8. Levels of neighbours melt: [0, 1, 2, 3] is 4 at stride 1.
A level of stride s and n members covers the span [s, s * n) of the mesh: two axes of one mesh have disjoint spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Span(NamedTuple):
    """What one level covers: ``low`` is its stride, ``high`` the stride of the next axis outward."""

    low: int
    high: int

    @property
    def size(self) -> int:
        """Members along this level."""
        return self.high // self.low


def spans(ranks: Sequence[int]) -> tuple[Span, ...] | None:
    """Levels of a rank list, innermost first; () for one rank; None for a list that is none of the groups of a regular mesh.

    The order of the members does not matter. A list whose first member is not at place 0 of every level ([1, 2]) is irregular too: no mesh
    over ranks 0, 1, 2, ... has such a group.
    """
    members = np.sort(np.asarray(ranks, np.int64))
    if not len(members):
        return None
    offset = members - members[0]
    found: list[Span] = []
    block = 1
    while block < len(offset):
        stride = int(offset[block])
        starts = offset[::block]
        along = starts == stride * np.arange(len(starts))
        count = len(starts) if along.all() else int(np.argmin(along))
        if stride == 0 or len(offset) % (block * count) or (found and stride % found[-1].high):
            return None
        found.append(Span(stride, stride * count))
        block *= count
    built = np.zeros(1, np.int64)
    for span in found:
        built = (np.arange(span.size)[:, None] * span.low + built).ravel()
    aligned = all(int(members[0]) // span.low % span.size == 0 for span in found)
    return tuple(found) if aligned and np.array_equal(built, offset) else None
