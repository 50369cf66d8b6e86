"""The lines of the comparison: predicted beside measured, a verdict, and where they differ the likely cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tracekit.analyses._predicted import ACTIVATIONS, Key, Prediction, Volume, moment_like, routed_bytes
from tracekit.memory.summary import DeviceMemory

MATCH, DIFFERS, NOT_MEASURED = "match", "differs", "not_measured"

#: Largest |ratio - 1| that still counts as a match. Everything else has to be equal.
TOLERANCES = {
    "memory.peak": 0.05,
    "memory.activations": 0.05,
    "memory.gathered_parameters": 0.05,
    "memory.unsharded_gradients": 0.05,
    "memory.communication_buffers": 0.05,
    "pipeline.bubble_share": 0.10,
}
#: Why exchanges between experts differ where the manifest does not list what the router did.
UNEVEN = "unevenness: the router sends more tokens to some experts than to others, and the model takes them to be balanced"
#: torch's Adam keeps a step counter of 4 bytes beside the moments of every parameter.
STEP_COUNTER = 4


@dataclass(frozen=True)
class Line:
    """One figure. ``rank`` None: of the whole job. None for what was not predicted or not measured; ``why``: the reason or the cause."""

    quantity: str
    rank: int | None
    predicted: float | None
    measured: float | None
    unit: str
    verdict: str
    why: str = ""
    tolerance: float = 0.0

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None where one is missing, or nothing was predicted."""
        if self.predicted is None or self.measured is None:
            return None
        if self.predicted == 0:
            return 1.0 if self.measured == 0 else None
        return self.measured / self.predicted


def line(quantity: str, rank: int | None, predicted: float | None, measured: float | None, unit: str, why: str = "") -> Line:
    """A line with its verdict; ``why`` is kept for what differs or is missing."""
    tolerance = TOLERANCES.get(quantity, 0.0)
    if predicted is None or measured is None:
        return Line(quantity, rank, predicted, measured, unit, NOT_MEASURED, why or "not measured", tolerance)
    equal = measured == predicted if not tolerance else abs(measured - predicted) <= tolerance * abs(predicted)
    return Line(quantity, rank, predicted, measured, unit, MATCH if equal else DIFFERS, "" if equal else why, tolerance)


# Collectives ---------------------------------------------------------------------------------------------------------


def traffic_lines(prediction: Prediction, measured: Mapping[Key, Volume], step: int) -> list[Line]:
    """Calls and bytes of every class of collectives of one rank in one step, in which ``measured`` was seen."""
    lines = []
    for key in sorted({*prediction.traffic, *measured}):
        expected, seen = prediction.traffic.get(key, Volume(0, 0)), measured.get(key, Volume(0, 0))
        name = f"collectives.{'.'.join(part or 'unknown' for part in key)}"
        why = cause(prediction, key, expected, seen)
        lines.append(line(f"{name}.calls", prediction.rank, expected.calls, seen.calls, "calls", why))
        size = expected.full_bytes
        if expected.uncertain:
            told = routed_bytes(prediction, expected, step)
            size, why = (size, UNEVEN) if told is None else (told, why)
        lines.append(line(f"{name}.bytes", prediction.rank, size, seen.full_bytes, "bytes", why))
    return lines


def cause(prediction: Prediction, key: Key, expected: Volume, seen: Volume) -> str:
    """Why a class differs from its prediction, as far as the figures tell."""
    found = prediction.found
    assert found is not None
    m = found.plan.batch.micro_batches
    if not expected.calls:
        return "the model knows no such collective in this job"
    if not seen.calls:
        return "predicted, and not in the trace"
    if m > 1 and seen.calls == m * expected.calls:
        return f"once in each of the {m} micro-batches, not once a step: no_sync or set_requires_gradient_sync(False) is not in force"
    if key[1] == "all_gather" and key[2] == "parameter_gather" and seen.calls > expected.calls:
        extra = seen.calls - expected.calls
        return f"{extra} all-gathers more: the root is gathered again in backward, or units are freed between micro-batches"
    if key[1] == "all_gather" and key[2] == "parameter_gather":
        return "fewer all-gathers: units stay gathered after forward (reshard_after_forward=False)"
    if seen.calls != expected.calls and seen.full_bytes == expected.full_bytes:
        return "the same bytes in other buckets"
    if expected.full_bytes and seen.full_bytes == 2 * expected.full_bytes:
        return "twice the bytes: it travels in an element type twice as wide (gradients reduced in fp32)"
    if seen.calls == expected.calls and 2 * seen.full_bytes == expected.full_bytes:
        return "half the bytes: it travels in an element type half as wide"
    if seen.calls == expected.calls and 0 < abs(seen.full_bytes - expected.full_bytes) <= 0.05 * expected.full_bytes:
        return "a few bytes: padding, or shards of unequal length"
    return "buckets or units are cut differently than the model takes them to be"


# Memory --------------------------------------------------------------------------------------------------------------


def memory_lines(prediction: Prediction, memory: DeviceMemory | None) -> list[Line]:
    """State, what is gathered, activations and the peak of one rank."""
    rank, state, peak = prediction.rank, prediction.state, prediction.peak
    assert state is not None
    if memory is None or memory.peak is None:
        why = "no allocations were recorded (profile_memory=True)"
        return [Line(f"memory.{name}", rank, value, None, "bytes", NOT_MEASURED, why) for name, value in _predicted_state(prediction)]
    seen = memory.categories
    lines = [line("memory.parameters", rank, state.parameters, seen.get("parameters", 0), "bytes", "buffers, or other padding")]
    counted = seen.get("optimizer_state", 0)
    lines.append(_optimizer(prediction, counted))
    if peak is None:
        why = "activations of this model are not known"
        return [*lines, Line("memory.peak", rank, None, memory.peak, "bytes", NOT_MEASURED, why)]
    moment = moment_like(prediction, seen)
    assert moment is not None
    why = _moment(prediction, memory)
    names = ["gradients"] if state.gradients_are_buckets or memory.peak_phase == peak.phase else []
    sharded = prediction.found is not None and prediction.found.plan.strategy.shards_parameters
    names += ["gathered_parameters", "unsharded_gradients"] if sharded else []
    for name in (*names, "communication_buffers"):
        lines.append(line(f"memory.{name}", rank, moment.bytes[name], seen.get(name, 0), "bytes", why))  # noqa: PERF401
    activations = sum(moment.bytes[name] for name in ACTIVATIONS)
    held = sum(seen.get(name, 0) for name in ("activations", "temporaries"))
    lines.append(line("memory.activations", rank, activations, held, "bytes", why))
    lines.append(line("memory.peak", rank, peak.total, memory.peak, "bytes", why))
    return lines


def _optimizer(prediction: Prediction, counted: int) -> Line:
    state = prediction.state
    assert state is not None
    told = prediction.manifest.optimizer
    predicted = state.optimizer_state
    extra = counted - predicted
    scalars = told.parameters * STEP_COUNTER if told is not None and told.kind.lower().endswith(("adam", "adamw")) else 0
    if 0 < extra <= scalars and extra % STEP_COUNTER == 0:
        predicted += extra  # one counter for each parameter that this rank updates
    return line("memory.optimizer_state", prediction.rank, predicted, counted, "bytes", "other states, or another element type")


def _moment(prediction: Prediction, memory: DeviceMemory) -> str:
    peak = prediction.peak
    if peak is not None and peak.phase != memory.peak_phase:
        return f"the model has the peak in {peak.phase}, the job had it in {memory.peak_phase or 'an unknown phase'}"
    if memory.categories.get("unattributed"):
        return f"{memory.categories['unattributed']} bytes at the peak have no owner"
    return "other moments of the step, scratch memory of kernels, or what the program holds beside the model"


def _predicted_state(prediction: Prediction) -> Sequence[tuple[str, int]]:
    state = prediction.state
    assert state is not None
    found = [("parameters", state.parameters), ("optimizer_state", state.optimizer_state), ("gradients", state.gradients)]
    return found if prediction.peak is None else [*found, ("peak", prediction.peak.total)]
