"""What comes out of one version of the FSDP experiment: the border between training and its tables and checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tracekit.simulate.experiment import Call, Moment
from tracekit.simulate.linear_model import LinearStack, Trained, Values
from tracekit.simulate.model_units import Unit
from tracekit.simulate.shard_layout import ShardLayout
from tracekit.simulate.sharded_units import Widths
from tracekit.simulate.virtual import Network


@dataclass(frozen=True)
class Outcome:
    """What came out of one version. ``moments``, ``network``, ``local`` are of the first step.

    ``results`` and ``reference`` are of every step, one after the other for each replica.
    """

    version: str
    model: LinearStack
    units: Sequence[Unit]
    layouts: Sequence[ShardLayout]
    widths: Widths
    kept: frozenset[str]
    aligned: int
    replicas: int
    moments: Sequence[Moment]
    network: Network
    local: Sequence[Values]
    results: Sequence[Trained]
    reference: Sequence[Trained]

    @property
    def name(self) -> str:
        """As it is called in tables."""
        return f"FSDP{self.version}"

    @property
    def world(self) -> int:
        """Number of ranks that share the model: of one replica."""
        return self.layouts[0].world

    @property
    def calls(self) -> list[Call]:
        """The collectives of rank 0 in the first step."""
        return self.network.calls(0)
