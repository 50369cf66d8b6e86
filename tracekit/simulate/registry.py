"""The numeric experiments by name: one experiment is one module and one line here; nothing is imported before it is asked for.

The module is ``tracekit.simulate.<name>``, a package where it has grown. It holds a frozen dataclass ``Arguments`` (each field made by
``arguments.option``), ``TITLE``, ``EXAMPLE`` (a command line) and ``run(arguments) -> Experiment``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from tracekit.simulate.experiment import Experiment

#: Name -> what it shows, in one line.
EXPERIMENTS = {
    "collectives": "Every collective by each of its algorithms: who sends what to whom, bytes and steps counted.",
    "fsdp": "One training step of FSDP1 (flat parameter) or FSDP2 (per-parameter shards), element by element.",
    "zero": "DDP and ZeRO stages 1, 2, 3 side by side: who holds what, and what it costs to send.",
    "tensor-parallel": "Linear layers, MLP and attention cut over ranks, forward and backward, with sequence parallelism.",
    "pipeline": "GPipe, 1F1B, interleaved and zero-bubble schedules: who works when, the bubble, activations in flight.",
    "context-parallel": "Attention over a cut sequence: gathered keys and values, a ring with online softmax, Ulysses.",
    "experts": "Routing, capacity, dispatch and combine of a mixture of experts over ranks.",
    "mesh": "Rank and coordinate, the groups of every axis, and which of them cross nodes.",
    "hybrid": "What every axis of a hybrid job sends in one micro-batch: kinds, calls, bytes, nodes crossed.",
    "sampler": "Which rank sees which samples: shuffling, padding, epochs, as torch's DistributedSampler deals them out.",
    "batch": "Fixed global against fixed local batch: what grows with the ranks, and whether the gradient stays the same.",
    "precision": "Range and rounding of number formats, loss scaling, and sums in 16 against 32 bits.",
}


class ExperimentModule(Protocol):
    """What the module of an experiment offers."""

    TITLE: str
    EXAMPLE: str
    Arguments: type[Any]

    def run(self, arguments: Any) -> Experiment:
        """Run it. Raises UsageError for arguments that make no sense."""


def load(name: str) -> ExperimentModule:
    """The module of an experiment, imported now. KeyError for a name that is none."""
    if name not in EXPERIMENTS:
        raise KeyError(name)
    return cast(ExperimentModule, importlib.import_module(f"tracekit.simulate.{name.replace('-', '_')}"))
