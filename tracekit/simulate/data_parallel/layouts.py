"""Which elements of which parameters each rank keeps of one unit, and where in its shard they stand.

A unit's shards are equally long (``shard_elements``), so that gathering and scattering them is one collective of equal parts: with W ranks
it moves W * shard_elements, padding included. Two layouts fill the same description; cutting, packing and joining need only that:

    flat   (FSDP1, ZeRO) all parameters end to end in one vector, cut into W equal shards wherever the cut falls. By default nothing stands
           between parameters and what is missing at the end is padding; aligned (``use_orig_params``), each parameter begins at a multiple
           of 16 bytes and the optimizer works on the parameters' views: no state for padding
    rows   (FSDP2) each parameter is cut along its dimension 0, DTensor's ``Shard(0)``: rank r keeps rows ``[r*c, min((r+1)*c, d0))`` with
           c = ceil(d0 / W), the last ranks fewer or none. c rows are stored on every rank; the optimizer sees the rows alone

Sources: PyTorch FSDP, arXiv:2304.11277, section 3.2.1; torch.distributed.fsdp, ``FlatParamHandle`` and ``fully_shard``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
import numpy.typing as npt

from tracekit.errors import UsageError

Array = npt.NDArray[np.float64]
#: Bytes at a multiple of which a view of an original parameter begins under use_orig_params.
ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class ParameterShape:
    """A parameter by name and shape; its elements are numbered row by row."""

    name: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements; 1 for a scalar (shape ())."""
        return prod(self.shape)


@dataclass(frozen=True)
class Segment:
    """Elements that stand side by side in a shard: ``[begin, end)`` of a parameter, at ``offset`` of the shard.

    ``parameter`` None: padding, then ``begin`` is 0 and ``end`` its length. ``label`` is how a reader sees it (``b1[0:1]``).
    """

    parameter: str | None
    begin: int
    end: int
    offset: int
    label: str

    @property
    def elements(self) -> int:
        """Length of the segment."""
        return self.end - self.begin


@dataclass(frozen=True)
class ShardLayout:
    """The shards of one unit. ``segments[rank]`` covers ``[0, shard_elements)`` without gap or overlap, in order of ``offset``.

    ``gathered`` are the segments of the unit once it is gathered and usable: each parameter whole, with the padding that stays in its
    storage. ``flat``: the unit is one vector, and its shards end to end are that vector: gathering needs no copy. ``state_has_padding``:
    the optimizer sees the whole shard as one parameter, padding included.
    """

    name: str
    world: int
    parameters: tuple[ParameterShape, ...]
    segments: tuple[tuple[Segment, ...], ...]
    shard_elements: int
    gathered: tuple[Segment, ...]
    flat: bool
    state_has_padding: bool

    @property
    def elements(self) -> int:
        """Elements of the unit's parameters, without padding."""
        return sum(parameter.elements for parameter in self.parameters)

    @property
    def padded_elements(self) -> int:
        """What one all-gather or reduce-scatter of the unit moves: W shards."""
        return self.world * self.shard_elements

    @cached_property
    def _starts(self) -> dict[str, int]:
        """Where each parameter begins when all are laid end to end."""
        starts, at = {}, 0
        for parameter in self.parameters:
            starts[parameter.name] = at
            at += parameter.elements
        return starts

    @cached_property
    def _sources(self) -> npt.NDArray[np.int64]:
        """For each element of all shards in rank order: its index among the parameters laid end to end; -1 for padding."""
        source = np.full(self.padded_elements, -1, np.int64)
        for rank, segments in enumerate(self.segments):
            for segment in segments:
                if segment.parameter is not None:
                    at = rank * self.shard_elements + segment.offset
                    source[at : at + segment.elements] = self._starts[segment.parameter] + np.arange(segment.begin, segment.end)
        return source

    def pack(self, full: Mapping[str, Array]) -> Array:
        """All shards end to end, rank 0 first, from full tensors; padding is 0. The input of a reduce-scatter. Shape [W * shard]."""
        joined = np.concatenate([full[p.name].reshape(-1) for p in self.parameters] or [np.empty(0)])
        packed = np.zeros(self.padded_elements)
        kept = self._sources >= 0
        packed[kept] = joined[self._sources[kept]]
        return packed

    def split(self, full: Mapping[str, Array]) -> list[Array]:
        """The shard of every rank, each of shape [shard_elements]."""
        return [shard.copy() for shard in np.split(self.pack(full), self.world)]

    def unpack(self, packed: Array) -> dict[str, Array]:
        """Full tensors from all shards end to end; padding is dropped. Inverse of ``pack``."""
        joined = np.empty(self.elements)
        kept = self._sources >= 0
        joined[self._sources[kept]] = packed[kept]
        return {p.name: joined[self._starts[p.name] :][: p.elements].reshape(p.shape) for p in self.parameters}

    def arrange(self, packed: Array) -> Array:
        """The storage of the gathered unit, as ``gathered`` describes it, from all shards end to end. Shape [W * shard], a copy."""
        if self.flat:
            return packed.copy()
        full = self.unpack(packed)
        stored = np.zeros(self.padded_elements)
        for segment in self.gathered:
            if segment.parameter is not None:
                stored[segment.offset : segment.offset + segment.elements] = full[segment.parameter].reshape(-1)
        return stored

    def views(self, stored: Array) -> dict[str, Array]:
        """Every parameter as a view into the storage of the gathered unit."""
        offsets = {segment.parameter: segment.offset for segment in self.gathered}
        return {p.name: stored[offsets.get(p.name, 0) :][: p.elements].reshape(p.shape) for p in self.parameters}

    def state_segments(self, rank: int) -> tuple[Segment, ...]:
        """The segments that the optimizer keeps state for."""
        return tuple(segment for segment in self.segments[rank] if self.state_has_padding or segment.parameter is not None)

    def state_mask(self, rank: int) -> npt.NDArray[np.bool_]:
        """Which elements of the rank's shard have optimizer state. Shape [shard_elements]."""
        mask = np.zeros(self.shard_elements, np.bool_)
        for segment in self.state_segments(rank):
            mask[segment.offset : segment.offset + segment.elements] = True
        return mask


def padding(length: int, offset: int) -> Segment:
    """``length`` elements that belong to no parameter."""
    return Segment(None, 0, length, offset, "padding")


def whole(parameter: ParameterShape, offset: int = 0) -> Segment:
    """All elements of a parameter."""
    return Segment(parameter.name, 0, parameter.elements, offset, parameter.name)


@dataclass(frozen=True)
class Interval:
    """``[begin, end)`` of the flat parameter; ``parameter`` None is padding."""

    parameter: ParameterShape | None
    begin: int
    end: int


def intervals(parameters: Sequence[ParameterShape], world: int, aligned_elements: int = 0) -> tuple[Interval, ...]:
    """Where each parameter and each padding stands in the flat parameter, without gaps, up to ``W * shard`` elements.

    ``aligned_elements``: each parameter begins at a multiple of it (16 bytes over the size of an element); 0 or 1 pads only the end. Either
    way the end is padded to a multiple of ``world``. Parameters without elements have an empty interval.
    """
    found: list[Interval] = []
    at = 0
    for parameter in parameters:
        gap = -at % aligned_elements if aligned_elements else 0
        if gap:
            found.append(Interval(None, at, at + gap))
            at += gap
        found.append(Interval(parameter, at, at + parameter.elements))
        at += parameter.elements
    if at % world:
        found.append(Interval(None, at, at + -at % world))
    return tuple(found)


def flat_layout(name: str, parameters: Sequence[ParameterShape], world: int, aligned_elements: int = 0) -> ShardLayout:
    """The shards of a flat parameter: rank r keeps ``[r*s, (r+1)*s)`` of it, s its padded length over ``world``.

    Of aligned parameters the optimizer sees the views (state without padding), otherwise the shard as one parameter.
    """
    flat = intervals(parameters, world, aligned_elements)
    shard = (flat[-1].end if flat else 0) // world
    segments = tuple(_cut(flat, rank * shard, (rank + 1) * shard) for rank in range(world))
    gathered = _cut(flat, 0, world * shard)
    return ShardLayout(name, world, tuple(parameters), segments, shard, gathered, flat=True, state_has_padding=not aligned_elements)


def _cut(flat: Sequence[Interval], begin: int, end: int) -> tuple[Segment, ...]:
    """The segments of ``[begin, end)``, at offsets from its begin."""
    segments = []
    for interval in flat:
        low, high = max(begin, interval.begin), min(end, interval.end)
        if low >= high:
            continue
        if interval.parameter is None:
            segments.append(padding(high - low, low - begin))
        else:
            first, last = low - interval.begin, high - interval.begin
            label = label_of_elements(interval.parameter, first, last)
            segments.append(Segment(interval.parameter.name, first, last, low - begin, label))
    return tuple(segments)


def label_of_elements(parameter: ParameterShape, begin: int, end: int) -> str:
    """``W1`` for a whole parameter, ``b1[0:1]`` for a part of a vector, ``flat(W1)[0:4]`` for a part of anything else, row by row."""
    if (begin, end) == (0, parameter.elements):
        return parameter.name
    return f"{parameter.name}[{begin}:{end}]" if len(parameter.shape) == 1 else f"flat({parameter.name})[{begin}:{end}]"


def rows_of_rank(rows: int, world: int, rank: int) -> tuple[int, int]:
    """``[begin, end)`` of the rows that ``rank`` keeps of ``rows``; empty for the last ranks where there are too few."""
    chunk = -(-rows // world)
    return min(rank * chunk, rows), min((rank + 1) * chunk, rows)


def rows_layout(name: str, parameters: Sequence[ParameterShape], world: int) -> ShardLayout:
    """The shards of a unit whose parameters are sharded one by one: a rank's chunk of each, in order, each padded to a full chunk."""
    for parameter in parameters:
        if not parameter.shape:
            raise UsageError(f"parameter {parameter.name} is a scalar and has no dimension 0 to shard", "give it the shape (1,)")
    stored = [-(-p.shape[0] // world) * prod(p.shape[1:]) for p in parameters]
    segments = tuple(_padded([_rows(p, *rows_of_rank(p.shape[0], world, rank)) for p in parameters], stored) for rank in range(world))
    gathered = _padded([whole(p) for p in parameters], [world * length for length in stored])
    return ShardLayout(name, world, tuple(parameters), segments, sum(stored), gathered, flat=False, state_has_padding=False)


def _rows(parameter: ParameterShape, begin: int, end: int) -> Segment:
    rest = prod(parameter.shape[1:])
    label = parameter.name if (begin, end) == (0, parameter.shape[0]) else f"{parameter.name}[{begin}:{end}]"
    return Segment(parameter.name, begin * rest, end * rest, 0, label)


def _padded(segments: Sequence[Segment], stored: Sequence[int]) -> tuple[Segment, ...]:
    """The segments behind each other, each in a storage of ``stored`` elements of which it fills the front; empty ones left out."""
    found: list[Segment] = []
    at = 0
    for segment, length in zip(segments, stored, strict=True):
        if segment.elements:
            found.append(Segment(segment.parameter, segment.begin, segment.end, at, segment.label))
        if length > segment.elements:
            found.append(padding(length - segment.elements, at + segment.elements))
        at += length
    return tuple(found)
