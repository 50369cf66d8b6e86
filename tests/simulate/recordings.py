"""What the recordings in sample_traces show of one rank and step, and a model for the simulator that has a recording's sizes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tracekit.job.load import LoadOptions, load_job
from tracekit.simulate.data_parallel.layouts import Array, ParameterShape
from tracekit.simulate.data_parallel.model import Samples
from tracekit.simulate.data_parallel.units import Unit

SAMPLES = Path(__file__).resolve().parents[2] / "sample_traces"

#: One collective: kind, mesh axis, purpose, bytes of the full tensor.
Shown = tuple[str, str, str, int]


@dataclass(frozen=True)
class Recorded:
    """One sample. ``manifest`` is that of the first rank there is."""

    name: str
    manifest: dict[str, Any]

    @cached_property
    def _operations(self) -> list[tuple[int, int, Shown]]:
        """(rank, step, what) of everything that belongs to a step, in the order of its start."""
        job = load_job([str(SAMPLES / self.name)], LoadOptions())
        frame = job.operations[job.operations["launch_step_number"] >= 0].sort_values("start_ns")
        columns = ("rank", "launch_step_number", "kind", "group", "purpose", "full_bytes")
        return [
            (int(rank), int(step), (str(kind), job.groups[group].axis if group >= 0 else "", str(purpose), int(full)))
            for rank, step, kind, group, purpose, full in zip(*(frame[name] for name in columns), strict=True)
        ]

    def calls(self, rank: int = 0) -> list[Shown]:
        """What ``rank`` shows in its last whole step; every other step has to show the same kinds."""
        steps = {step for of, step, _ in self._operations if of == rank}
        each = {step: [shown for of, when, shown in self._operations if (of, when) == (rank, step)] for step in steps}
        last = each[max(steps)]
        assert all([shown[:3] for shown in other] == [shown[:3] for shown in last] for other in each.values())
        return last

    @property
    def parameters(self) -> tuple[ParameterShape, ...]:
        """The whole parameters of the model, in order; the manifest of a flat parameter has only shards of them."""
        m = self.manifest["model"]
        hidden, kv = m["hidden"], m["hidden"] // m["heads"] * m["kv_heads"]
        block = {
            "attention_norm": (hidden,), "attention.q": (hidden, hidden), "attention.k": (kv, hidden), "attention.v": (kv, hidden),
            "attention.o": (hidden, hidden), "mlp_norm": (hidden,), "mlp.up": (m["ffn"], hidden), "mlp.down": (hidden, m["ffn"]),
        }  # fmt: skip
        shapes = {"embedding.tokens": (m["vocabulary"], hidden), "embedding.positions": (m["sequence"], hidden)}
        shapes |= {f"layers.{layer}.{name}": shape for layer in range(m["layers"]) for name, shape in block.items()}
        shapes |= {"norm": (hidden,), "head": (m["vocabulary"], hidden)}
        found = tuple(ParameterShape(f"{name}.weight", shape) for name, shape in shapes.items())
        assert sum(p.elements for p in found) == m["parameters"]
        return found

    def size(self, axis: str) -> int:
        """Ranks along an axis."""
        return next(entry["size"] for entry in self.manifest["mesh"] if entry["name"] == axis)


@cache
def recorded(name: str) -> Recorded:
    """A sample by its name."""
    first = min((SAMPLES / name).glob("rank_*.manifest.json"), default=None)
    assert first is not None, f"there is no sample {name}: record it with sample_traces/record_all.py"
    return Recorded(name, json.loads(first.read_text()))


class ParameterChain:
    """A model in the place of ``LinearStack``: any parameters, one a layer, that compute nothing and have gradients of ones.

    The order of a step and what is sent depend on shapes alone, so this runs the simulator at the sizes of any model.
    """

    def __init__(self, parameters: tuple[ParameterShape, ...]) -> None:
        self.parameters = parameters
        self.layers = len(parameters)

    def layer_parameters(self, layer: int) -> tuple[ParameterShape, ...]:
        return (self.parameters[layer],)

    def initial(self) -> dict[str, Array]:
        return {p.name: np.zeros(p.shape) for p in self.parameters}

    def batch(self, world: int, micro_batches: int) -> Samples:
        return Samples(np.zeros((world * micro_batches, 1)), np.zeros((world * micro_batches, 1)))

    def forward_layer(self, layer: int, values: dict[str, Array], x: Array) -> Array:
        assert values[self.parameters[layer].name].shape == self.parameters[layer].shape
        return x

    def loss_gradient(self, y: Array, target: Array) -> Array:
        return y - target

    def backward_layer(self, layer: int, values: dict[str, Array], x: Array, y: Array, dy: Array) -> tuple[Array, dict[str, Array]]:
        assert values[self.parameters[layer].name].shape == self.parameters[layer].shape
        return dy, {self.parameters[layer].name: np.ones(self.parameters[layer].shape)}

    def units(self, described: list[dict[str, Any]]) -> list[Unit]:
        """The manifest's units as the simulator's, in the order given."""
        places = {p.name: place for place, p in enumerate(self.parameters)}
        return [Unit(u["name"] or "root", tuple(sorted(places[p] for p in u["parameters"])), u.get("root", False)) for u in described]
