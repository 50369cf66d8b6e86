"""A hybrid job's micro-batch: what every axis of the mesh sends, with arrays of the model's shapes moved through every group.

A transformer of L layers lies in p stages; a rank has n = s b / c tokens of the micro-batch. Bytes that a rank sends, for the l layers of
its stage, F(x) = (x-1)/x, elements of e bytes, gradients of g bytes:

    tp           all-reduce of n h after both blocks, forward and backward     4 l x 2 F(t) n h e; with sequence parallel all-gathers and
                                                                               reduce-scatters, two for each all-reduce: as many bytes
    cp           keys and values of all tokens gathered, again in backward;    3 l F(c) 2 s b h/t e
                 their gradients reduce-scattered
    ep           tokens to k experts each and back, twice (balanced)           4 l F(ep) k n h e
    dp_shard     parameters of a unit gathered, their gradients scattered      N (2 F(W) e + F(W) g), one e where units stay gathered
    dp_replicate gradients of the shards summed                                2 F(R) N/W g
    pp           activation to the next stage, gradient to the one before      n h e each

Parameters that every rank of a stage has (all but experts) are sharded over context and expert axes as well, as torchtitan does it; experts
over ``dp_shard`` (and cp) alone. Without a sharding axis, gradients are summed over all these axes. Sources: arXiv:1909.08053, 2205.05198
(tp), 2310.01889 (cp), 2006.16668 (ep), 1910.02054 and 2304.11277 (dp), 2104.04473 (pp).
"""

from __future__ import annotations

import math
from collections import Counter

from tracekit.collectives.purpose import role_of_axis
from tracekit.errors import UsageError
from tracekit.mesh.mesh import Axis, parse_mesh
from tracekit.simulate.arguments import check, values, within
from tracekit.simulate.experiment import Experiment
from tracekit.simulate.hybrid.figures import axes_of, checks, group_of, tables
from tracekit.simulate.hybrid.job import Arguments, Job
from tracekit.units import format_bytes

__all__ = ["EXAMPLE", "TITLE", "Arguments", "run"]

TITLE = "Hybrid parallelism: what each axis sends in one micro-batch"
EXAMPLE = "tracekit simulate hybrid --mesh pp=2,dp_shard=2,cp=2,tp=2 --layers 4 -o hybrid.html"
MOST_RANKS, MOST_MOVED = 256, 5 * 10**7


def run(arguments: Arguments) -> Experiment:
    """Move one micro-batch's collectives. UsageError for a mesh that is none, or sizes that do not divide."""
    axes = _checked(arguments)
    job = Job(arguments, axes)
    within(_moved(job), MOST_MOVED, "elements moved", "take fewer layers, a smaller hidden size, sequence or vocabulary")
    job.micro_batch()
    return Experiment(
        name="hybrid",
        title=TITLE,
        about="One rank's micro-batch, forward and backward, through every group that the rank is in; arrays of the model's shapes are "
        "moved, and bytes are counted from them.",
        arguments=values(arguments),
        verdict=_verdict(job),
        tables=tables(job),
        checks=checks(job),
        calls=job.network.calls(arguments.rank),
        notes=_notes(job),
    )


def _checked(a: Arguments) -> tuple[Axis, ...]:
    check(a)
    axes = parse_mesh(a.mesh)
    world = math.prod(axis.size for axis in axes)
    if any(axis.size < 1 for axis in axes) or world > MOST_RANKS:
        raise UsageError(f"--mesh {a.mesh}", f"give every axis its size, and at most {MOST_RANKS} ranks together")
    unknown = [axis.name for axis in axes if role_of_axis(axis.name) in ("mixed", "whole", "loss", "embedding")]
    if unknown:
        raise UsageError(f"--mesh has an axis {unknown[0]}, of which no strategy is known", "use pp, dp_replicate, dp_shard, ep, cp and tp")
    if a.rank >= world:
        raise UsageError(f"--rank {a.rank} is not one of {world} ranks", f"give 0 to {world - 1}")
    job = Job(a, axes)
    tp, cp, ep = job.size("tensor"), job.size("context"), job.size("expert")
    for what, number, by in (
        ("--hidden", a.hidden, tp),
        ("--sequence", a.sequence, cp * (tp if a.sequence_parallel else 1)),
        ("--experts", job.experts, ep),
    ):
        if number % by:
            raise UsageError(f"{what} {number} does not divide by {by} ranks", f"give a multiple of {by}")
    if job.stages > a.layers:
        raise UsageError(f"{a.layers} layers do not fill {job.stages} stages", "give at least a layer a stage")
    if job.experts and a.top_k > job.experts:
        raise UsageError(f"a token cannot have {a.top_k} of {job.experts} experts", "give a smaller --top-k, or more experts")
    return axes


def _moved(job: Job) -> int:
    """Elements that will be moved, about."""
    tokens = job.local_tokens * job.a.hidden * 12 * job.own_layers * (1 + job.a.top_k)
    return tokens * job.size("tensor", "expert", "context") + 3 * sum(n for _, n, _ in job.units()) * job.size(
        "sharding", "data", "context"
    )


def _verdict(job: Job) -> str:
    total = sum(one.sent_bytes for one in job.sent)
    if not total:
        return f"Rank {job.a.rank} sends nothing: no axis has more than one rank."
    by_axis = Counter[str]()
    for one in job.sent:
        by_axis[one.axis] += one.sent_bytes
    parts = ", ".join(f"{axis} {format_bytes(size)} ({size / total:.0%})" for axis, size in by_axis.most_common())
    return f"Rank {job.a.rank} sends {format_bytes(total)} in one micro-batch: {parts}."


def _notes(job: Job) -> list[str]:
    notes = ["Gradients are reduced in the last micro-batch of a step alone; with one micro-batch a step that is this one."]
    crossing = [axis for axis in axes_of(job) if len({rank // job.a.gpus_per_node for rank in group_of(job, axis)}) > 1]
    if crossing:
        notes.append(f"Crosses nodes of {job.a.gpus_per_node} ranks: {', '.join(crossing)}.")
    if job.experts and job.names("expert"):
        notes.append("Tokens are spread evenly over the experts; a real router sends more to some (tracekit simulate experts).")
    return notes
