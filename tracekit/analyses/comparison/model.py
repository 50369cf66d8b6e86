"""The model beside the job, where manifests tell what was run: memory, traffic, the bubble, time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from tracekit.analyses import memory as memory_analysis
from tracekit.analyses import pipeline
from tracekit.analyses.collectives.links import Link
from tracekit.analyses.comparison.curve import over_one_step
from tracekit.analyses.comparison.lines import NOT_MEASURED, SHARE, Line, line
from tracekit.analyses.comparison.memory import memory_lines
from tracekit.analyses.comparison.predicted import Key, Prediction, Volume, predict
from tracekit.analyses.comparison.time import class_times, step_times
from tracekit.analyses.comparison.traffic import traffic_lines
from tracekit.analyses.memory.rows import main_devices
from tracekit.estimate.hardware import Hardware
from tracekit.estimate.pipeline import bubble_share
from tracekit.findings import StackedArea
from tracekit.job.model import Job
from tracekit.manifest import Manifest


def modelled(
    job: Job, manifests: Mapping[int, Manifest], axes: Sequence[Link], hardware: Hardware | None
) -> tuple[list[Line], list[str], StackedArea | None]:
    """(lines in order of rank, why ranks were not predicted, memory over one step)."""
    memory = {row.rank: row.memory for row in main_devices(memory_analysis.analyze(job).rows)}
    steps = {rank: row.peak_step for rank, row in memory.items()}
    predictions = [predict(rank, manifest, steps.get(rank)) for rank, manifest in sorted(manifests.items())]
    problems = list(dict.fromkeys(p.problem for p in predictions if p.problem))
    predictions = [p for p in predictions if not p.problem]
    lines: list[Line] = []
    for prediction in predictions:
        lines += memory_lines(prediction, memory.get(prediction.rank))
        lines += traffic_lines(prediction, *measured_traffic(job, prediction.rank))
    lines += _bubble(job, predictions)
    if predictions:
        lines += class_times(job, axes)
        lines += [Line("model", None, None, None, "", NOT_MEASURED, problem) for problem in problems]
    lines += step_times(job, predictions, hardware)
    return lines, problems, over_one_step(job, predictions, memory)


def measured_traffic(job: Job, rank: int) -> tuple[dict[Key, Volume], int]:
    """(calls and full bytes of each class of one rank, the step they are of): the first step whose calls and bytes most steps share."""
    operations = job.operations
    own = operations[(operations["rank"] == rank) & (operations["launch_step_number"] >= 0) & (operations["kind"] != "barrier")]
    if job.steps:
        own = own[own["launch_step_number"].isin(job.steps)]
    steps: dict[int, dict[Key, list[int]]] = {}
    columns = (own["launch_step_number"], own["group"], own["kind"], own["purpose"], own["full_bytes"])
    for step, group, kind, purpose, full in zip(*columns, strict=True):
        key = (job.groups[group].axis if group >= 0 else "", str(kind), str(purpose))
        steps.setdefault(int(step), {}).setdefault(key, []).append(int(full))
    if not steps:
        return {}, -1
    signatures = {step: tuple(sorted((key, len(sizes), _total(sizes)) for key, sizes in found.items())) for step, found in steps.items()}
    usual = Counter(signatures.values()).most_common(1)[0][0]
    step = next(step for step, signature in signatures.items() if signature == usual)
    return {key: Volume(calls, size) for key, calls, size in usual}, step


def _total(sizes: Sequence[int]) -> int:
    """Sum of full bytes; -1 where some are not recorded."""
    return sum(sizes) if min(sizes) >= 0 else -1


def _bubble(job: Job, predictions: Sequence[Prediction]) -> list[Line]:
    """The pipeline's bubble share, where there is a pipeline."""
    plans = {(p.found.plan.schedule, p.found.plan.mesh.pp, p.found.plan.batch.micro_batches, p.found.plan.virtual_stages)
             for p in predictions if p.found is not None and p.found.plan.mesh.pp > 1}  # fmt: skip
    if len(plans) != 1:
        return []
    schedule, p, m, v = plans.pop()
    measured, why = _measured_bubble(job)
    if any(each.found is not None and each.found.defers_weights for each in predictions):
        return _replayed_bubble(job, measured, why)
    share = float(bubble_share(schedule, p, m, 1, 1, 1, v))
    return [line("pipeline.bubble_share", None, share, measured, "share", why, SHARE)]


def _replayed_bubble(job: Job, measured: float | None, why: str) -> list[Line]:
    """Of a schedule without a closed form: its own order of work, replayed with equal stages and free messages."""
    summary = pipeline.analyze(job).summary
    if summary is None or summary.ideal is None:
        return [Line("pipeline.bubble_share", None, None, measured, "share", NOT_MEASURED, "no closed form of this schedule is known")]
    return [line("pipeline.bubble_share", None, summary.ideal, measured, "share", why, SHARE)]


def _measured_bubble(job: Job) -> tuple[float | None, str]:
    """(share of the run in which a rank has nothing of its stage to do, why it is another one than the closed form's, or unknown)."""
    found = pipeline.analyze(job)
    if found.summary is None:
        return None, found.reason
    measured, unequal = found.summary.measured, found.summary.replayed
    if measured is None:
        return None, "; ".join(found.summary.notes) or "the clocks of the ranks are not aligned"
    if unequal is None:
        return measured, "stages are of unequal length, or wait for messages: the model has equal stages and free messages"
    rest = "the rest is messages and the host's time between pieces of work, which the model takes to be free"
    return measured, f"stages of unequal length make it {unequal:.3f}; {rest}"
