"""Lines of memory: what a rank keeps, to the byte; and the composition of its peak, beside the moment of the model that is most like it.

A job's peak is one of several nearly equal moments of a step; which one, some kilobytes decide. So categories are compared at the moment,
among the model's moments near its peak, whose categories are most like the job's, and the peak itself with the model's peak.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tracekit.analyses.comparison.lines import BYTES, NOT_MEASURED, PEAK_TIGHT, PEAK_WIDE, SCALARS, UNEVEN, Line, line
from tracekit.analyses.comparison.predicted import Prediction
from tracekit.estimate.pipeline import boundary_bytes
from tracekit.estimate.plan import Plan
from tracekit.estimate.shape import ModelShape
from tracekit.estimate.timeline import Moment
from tracekit.memory.summary import DeviceMemory

#: Moments this close to the peak are taken for it.
NEAR = 0.05
#: torch's Adam keeps a step counter of 4 bytes beside the moments of every parameter.
STEP_COUNTER = 4
#: Line -> the categories it adds up. Which of the last three scratch memory and logits belong to depends on the recording.
GROUPS: Mapping[str, Sequence[str]] = {
    "gradients": ("gradients",),
    "gathered_parameters": ("gathered_parameters",),
    "unsharded_gradients": ("unsharded_gradients",),
    "communication_buffers": ("communication_buffers",),
    "activations": ("activations", "logits", "temporaries"),
}
_FLAT = "gradients of views of a flat parameter have no owner until they are made flat: they are counted with the activations"
_DEFERRED = "gradients of weights are computed later than those of inputs: what they are made of until then is not in the model"
_NO_EVENTS = "no allocations were recorded (profile_memory=True)"


def groups_of(prediction: Prediction) -> dict[str, Sequence[str]]:
    """Line -> categories.

    Gradients of views of flat units have no owner of their own; DeepSpeed's lie in its buckets; what is left of a unit that is resharded to
    a smaller group lies in a buffer.
    """
    groups = dict(GROUPS)
    if _flat(prediction):
        groups["activations"] = (*groups["activations"], *groups.pop("unsharded_gradients"))
    elif not isinstance(prediction.plan.reshard_after_forward, bool):
        groups["gathered_parameters"] = ("gathered_parameters", *groups.pop("communication_buffers"))
    elif prediction.plan.framework == "deepspeed":
        groups["gradients"] = ("gradients", *groups.pop("unsharded_gradients"), *groups.pop("communication_buffers"))
    return groups


def _flat(prediction: Prediction) -> bool:
    return prediction.plan.strategy.shards_parameters and prediction.plan.framework == "torch_fsdp1"


def moment_like(prediction: Prediction, seen: Mapping[str, int]) -> Moment | None:
    """Of the model's moments within ``NEAR`` of its peak the one whose categories are most like those of the job's peak."""
    if prediction.peak is None:
        return None
    near = [moment for moment in prediction.moments if moment.total >= (1 - NEAR) * prediction.peak.total]
    groups = groups_of(prediction).values()
    return min(near, key=lambda moment: sum(abs(_sum(moment.bytes, names) - _sum(seen, names)) for names in groups))


def _sum(sizes: Mapping[str, int], names: Sequence[str]) -> int:
    return sum(sizes.get(name, 0) for name in names)


def memory_lines(prediction: Prediction, memory: DeviceMemory | None) -> list[Line]:
    """State, what is gathered, activations and the peak of one rank."""
    rank, state, peak = prediction.rank, prediction.state, prediction.peak
    assert state is not None
    if memory is None or memory.peak is None:
        figures = [("parameters", state.parameters), ("optimizer_state", state.optimizer_state), ("gradients", state.gradients)]
        figures += [] if peak is None else [("peak", peak.total)]
        why = _NO_EVENTS if memory is None else "; ".join(memory.notes) or _NO_EVENTS
        return [Line(f"memory.{name}", rank, value, None, "bytes", NOT_MEASURED, why) for name, value in figures]
    seen = memory.categories
    lines = [_parameters(prediction, memory), _optimizer(prediction, memory)]
    if peak is None:
        why = _DEFERRED if prediction.found is not None and prediction.found.defers_weights else "activations of this model are not known"
        return [*lines, Line("memory.peak", rank, None, memory.peak, "bytes", NOT_MEASURED, why)]
    moment = moment_like(prediction, seen)
    assert moment is not None
    lines += _composition(prediction, memory, moment)
    why = cause(prediction, memory, moment, "peak", memory.peak - peak.total)
    tolerance = PEAK_TIGHT if _plain_data_parallel(prediction) else PEAK_WIDE
    return [*lines, line("memory.peak", rank, peak.total, memory.peak, "bytes", why, tolerance)]


def _plain_data_parallel(prediction: Prediction) -> bool:
    """DDP, FSDP1, FSDP2 and nothing else."""
    assert prediction.found is not None
    plan = prediction.found.plan
    return plan.strategy.name in ("ddp", "fsdp1", "fsdp2") and plan.mesh.world == plan.mesh.data and not plan.implementation.averages_after


def _composition(prediction: Prediction, memory: DeviceMemory, moment: Moment) -> list[Line]:
    lines, rank, seen = [], prediction.rank, memory.categories
    sharded = prediction.plan.strategy.shards_parameters
    assert prediction.state is not None
    for name, categories in groups_of(prediction).items():
        if name in ("gathered_parameters", "unsharded_gradients") and not sharded:
            continue
        if name == "gradients" and not prediction.state.gradients_are_buckets and memory.peak_phase != moment.phase:
            continue
        expected, found = _sum(moment.bytes, categories), _sum(seen, categories)
        exact = name != "activations" and prediction.plan.framework != "deepspeed"
        why = cause(prediction, memory, moment, name, found - expected)
        lines.append(line(f"memory.{name}", rank, expected, found, "bytes", why, 0.0 if exact else BYTES))
    if _flat(prediction):
        lines.append(Line("memory.unsharded_gradients", rank, moment.bytes["unsharded_gradients"], None, "bytes", NOT_MEASURED, _FLAT))
    return lines


def _parameters(prediction: Prediction, memory: DeviceMemory) -> Line:
    assert prediction.state is not None
    expected, found = prediction.state.parameters, memory.categories.get("parameters", 0)
    why = f"{abs(found - expected)} bytes {'more' if found > expected else 'less'}: "
    why += "padding of another kind, or parameters of a module that the model does not know" if found > expected else "some are not listed"
    return line("memory.parameters", prediction.rank, expected, found, "bytes", _bounded(memory, why))


def _optimizer(prediction: Prediction, memory: DeviceMemory) -> Line:
    """Counters of steps, and what else is one number, belong to it; how many there are the manifest says."""
    state, optimizer = prediction.state, prediction.manifest.optimizer
    assert state is not None
    found = prediction.found
    predicted, counted = state.optimizer_state, memory.categories.get("optimizer_state", 0)
    extra = counted - predicted
    scalars = 0
    if optimizer is not None and optimizer.kind.lower().endswith(("adam", "adamw")):
        scalars = max(1, optimizer.parameters) * STEP_COUNTER
    if found is not None and prediction.plan.framework == "deepspeed":  # norms of gradients and scales of losses stay
        scalars += sum(row.full_bytes for row in found.flags) + SCALARS
    if 0 < extra <= scalars and extra % STEP_COUNTER == 0:
        predicted += extra
    why = f"{abs(extra)} bytes {'more' if extra > 0 else 'less'}: other states, another element type, or another share of the parameters"
    return line("memory.optimizer_state", prediction.rank, predicted, counted, "bytes", _bounded(memory, why))


def _bounded(memory: DeviceMemory, why: str) -> str:
    return f"{why}; the recording shows lower bounds only" if memory.least else why


def _uneven(plan: Plan, shape: ModelShape | None, extra: int) -> str:
    """What the model cannot know of experts at one moment."""
    if shape is None or not shape.experts:
        return ""
    reasons = []
    if not plan.expert_loads:
        reasons.append(UNEVEN)
    elif plan.batch.micro_batches > 1:
        reasons.append("unevenness: experts get other numbers of rows in each micro-batch, and the model takes their mean")
    if plan.implementation.backend_copies and extra > 0:
        reasons.append("the backend's threads may still hold the buffers of the last exchange")
    return "; ".join(reasons)


def cause(prediction: Prediction, memory: DeviceMemory, moment: Moment, name: str, extra: int) -> str:
    """Why a category, or the peak, differs by ``extra`` bytes from the model's ``moment``: what is known to do so, else where both are."""
    assert prediction.found is not None
    plan, shape = prediction.found.plan, prediction.found.shape
    size = f"{abs(extra)} bytes {'more' if extra > 0 else 'less'}"
    unowned = memory.categories.get("unattributed", 0)
    message = 0
    if plan.mesh.pp > 1 and shape is not None:
        message = boundary_bytes(shape.sequence, plan.batch.micro_batch, shape.hidden, plan.recipe.autograd, 1, plan.mesh.cp)
    if memory.least:
        return f"{size}: the recording began after some allocations, so that amounts are lower bounds"
    if name == "gradients" and message and extra % message == 0:
        count, held = abs(extra) // message, "are held for the stage before" if extra > 0 else "are not there yet"
        return f"{size}: gradients of {count} stage input{'s' if count > 1 else ''}, {message} bytes each, {held}"
    if name in ("activations", "peak") and (uneven := _uneven(plan, shape, extra)):
        return f"{size}: {uneven}"
    if plan.framework == "deepspeed":
        return f"{size}: DeepSpeed keeps gradients in buffers of a bucket and of its partition, and parameters that it used last"
    if plan.implementation.backend_copies and plan.strategy.name == "zero3" and name in ("communication_buffers", "activations", "peak"):
        return f"{size}: whether the backend's copy of a unit that is being gathered is still there when the one before computes is timing"
    if 2 * unowned >= abs(extra) > 0:
        return f"{size}: {unowned} bytes at the peak have no owner"
    if moment.phase != memory.peak_phase:
        return f"{size}: the model has the peak in {moment.phase}, the job had it in {memory.peak_phase or 'an unknown phase'}"
    where = f"{moment.phase} of {moment.unit}" if moment.unit else moment.phase
    there = f", the job's in {memory.peak_phase} of {memory.peak_unit}" if memory.peak_unit else ""
    return f"{size}: the model's moment is {where} ({moment.what}){there}; kernels' scratch memory is not in it"
