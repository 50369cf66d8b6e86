"""What the analytical model says of the ranks of a recorded job: memory at the peak, and collectives of a step by class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tracekit.errors import UsageError
from tracekit.estimate.communication import model_parallel
from tracekit.estimate.estimate import check, chunk_activations, estimate_parameters, local_parameters
from tracekit.estimate.hardware import HARDWARE
from tracekit.estimate.memory import RankMemory, rank_memory
from tracekit.estimate.model_state import ModelState
from tracekit.estimate.parameters import stage_chunks
from tracekit.estimate.plan import Plan
from tracekit.estimate.recorded import Recorded, parameters_of, recorded, routed_rows
from tracekit.estimate.recorded_axes import by_roles
from tracekit.estimate.shape import ModelShape
from tracekit.estimate.timeline import Moment
from tracekit.estimate.traffic import Traffic, data_parallel, merged
from tracekit.manifest import Manifest

#: No rank has as much memory, or sends as much in a step.
MOST_BYTES = 2**60
#: (axis, kind, purpose): a class of collectives.
Key = tuple[str, str, str]


@dataclass(frozen=True)
class Volume:
    """What one class of collectives of one rank moves in a step. ``uncertain``: its bytes depend on the router."""

    calls: int
    full_bytes: int
    uncertain: bool = False


@dataclass(frozen=True)
class Prediction:
    """Of one rank. ``problem`` says why there is none; then everything else is empty."""

    rank: int
    manifest: Manifest
    found: Recorded | None = None
    state: ModelState | None = None
    peak: Moment | None = None
    moments: Sequence[Moment] = ()
    traffic: Mapping[Key, Volume] = field(default_factory=dict)
    problem: str = ""

    @property
    def plan(self) -> Plan:
        """The plan of a rank that was predicted."""
        assert self.found is not None
        return self.found.plan


def predict(rank: int, manifest: Manifest, peak_step: int | None = None) -> Prediction:
    """The model's figures for the job and rank of a manifest. ``peak_step``: the step whose memory is wanted; experts differ by step."""
    manifest = by_roles(manifest)
    try:
        found = recorded(manifest, peak_step)
        memory, rows = _of_transformer(found.shape, found) if found.shape is not None else _of_any(manifest, found)
    except UsageError as error:
        return Prediction(rank, manifest, problem=error.problem)
    rows = merged([*rows, *found.flags])
    if max(memory.peak.total, memory.state.total, *(row.calls * row.full_bytes for row in rows), 0) > MOST_BYTES:
        return Prediction(rank, manifest, problem="the sizes in the manifest are those of no job: a rank would hold or send exabytes")
    known = found.shape is not None and not found.defers_weights
    peak, moments = (memory.peak, memory.moments) if known else (None, ())
    return Prediction(rank, manifest, found, memory.state, peak, moments, classes(found, rows))


def _of_transformer(shape: ModelShape, found: Recorded) -> tuple[RankMemory, list[Traffic]]:
    check(shape, found.plan)
    plan, stage = found.plan, found.stage
    held = found.wrapped(local_parameters(shape, plan, stage))
    memory = rank_memory(held, chunk_activations(shape, plan, stage), plan, stage, found.shard_rank)
    layers = [layer for chunk in stage_chunks(shape.layers, plan.mesh.pp, plan.virtual_stages, stage, plan.vee) for layer in chunk]
    return memory, [*data_parallel(held, plan), *model_parallel(shape, plan, layers, stage, held)]


def _of_any(manifest: Manifest, found: Recorded) -> tuple[RankMemory, list[Traffic]]:
    """A model that is no transformer we know: its parameters are exact, of its activations nothing is known."""
    held = found.wrapped(parameters_of(manifest))
    if not held:
        raise UsageError("the manifest lists no parameters")
    role = estimate_parameters(held, found.plan, HARDWARE["h100"], shard_rank=found.shard_rank)
    return role.memory, list(role.traffic)


def classes(found: Recorded, rows: Sequence[Traffic]) -> dict[Key, Volume]:
    """Predicted traffic under the recording's names of axes."""
    calls: Counter[Key] = Counter()
    sizes: Counter[Key] = Counter()
    for row in rows:
        key = (found.axis_of(row), row.kind, row.purpose)
        calls[key] += row.calls
        sizes[key] += row.calls * row.full_bytes
    routed = ("expert_dispatch", "expert_combine") if not found.plan.expert_padding else ()
    return {key: Volume(calls[key], sizes[key], key[2] in routed) for key in calls}


def routed_bytes(prediction: Prediction, balanced: Volume, step: int) -> int | None:
    """Bytes of one class of exchanges between experts in a step whose loads were recorded; None where they were not.

    Rows go out and their gradients come back: each way once as many as this rank's tokens chose, once as many as reached its experts. The
    balanced figure has the choices both times.
    """
    found, rows = prediction.found, routed_rows(prediction.manifest, step)
    if rows is None or found is None or found.shape is None:
        return None
    choices, sent, arrived = rows
    return balanced.full_bytes + (sent + arrived - 2 * choices) * found.shape.hidden * found.plan.recipe.autograd
