"""The device mesh of a job: named axes with sizes, and every rank's coordinate on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """One mesh axis."""

    name: str
    size: int


@dataclass(frozen=True)
class Mesh:
    """Axes from outermost (largest stride) to innermost; ``coordinates[rank][i]`` is the rank's place on ``axes[i]``.

    ``source``: manifest, descriptions, rank_lists, user, or none (no axes). A rank without a coordinate is absent from the mapping.
    """

    axes: Sequence[Axis]
    coordinates: Mapping[int, tuple[int, ...]]
    source: str
