"""Fixed global against fixed local batch: what grows with the ranks, what shrinks, and whether the gradient stays the same.

    fixed global   each of W ranks takes G/W samples: the same gradient and the same steps, less work a rank and step (strong scaling)
    fixed local    each rank takes B samples: the global batch grows to W B, an epoch has fewer steps (weak scaling)

A step is modelled as accumulation micro-batches one after the other, then a ring all-reduce of the gradients that nothing hides
(``tracekit.collectives.cost``): an upper bound for the cost of communication. Gradients are computed on virtual ranks with a linear stack.
Sources: Goyal et al., arXiv:1706.02677 (linear scaling of the learning rate); McCandlish et al., arXiv:1812.06162 (gradient noise).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tracekit.collectives.cost import seconds
from tracekit.errors import UsageError
from tracekit.findings import Table
from tracekit.simulate.arguments import check, option, seed_of, values, within
from tracekit.simulate.data_parallel.model import LinearStack, Samples, Values, batches, largest_error, layers_from_text
from tracekit.simulate.data_parallel.run import GRADIENT_TOLERANCE
from tracekit.simulate.experiment import Check, Experiment
from tracekit.simulate.tables import Columns, table
from tracekit.simulate.virtual import Network, even_splits
from tracekit.units import capitalized

TITLE = "Batch size: fixed global against fixed local batch"
EXAMPLE = "tracekit simulate batch --global-batch 64 --local-batch 16 --worlds 1,2,4,8 -o batch.html"
MOST_SAMPLES, MOST_WORLD = 100_000, 1024


@dataclass(frozen=True)
class Arguments:
    """What can be chosen."""

    worlds: tuple[int, ...] = option((1, 2, 4, 8), "Numbers of data-parallel ranks to compare.")
    global_batch: int = option(64, "Samples G of a step on all ranks together, where that is fixed.", most=MOST_SAMPLES)
    local_batch: int = option(16, "Samples B of a step on each rank, where that is fixed.", most=MOST_SAMPLES)
    micro_batch: int = option(8, "Samples that a rank computes at a time; more are accumulated.", most=MOST_SAMPLES)
    samples: int = option(4096, "Samples of the data set, for the steps of an epoch.", most=10**9)
    layers: str = option("5x4,3x5", "Weights of the linear layers of the check, outputs x inputs of each.")
    sample_ms: float = option(2.0, "Forward and backward of one sample on one rank [ms].", least=0, most=10**9)
    overhead_ms: float = option(4.0, "What a micro-batch costs however small it is [ms]: launches, small kernels.", least=0, most=10**9)
    gradient_bytes: int = option(1_000_000_000, "Bytes of the model's gradients, for the time of the all-reduce.", most=10**15)
    latency_us: float = option(10.0, "Latency of one message [us].", least=0, most=10**9)
    bandwidth_gb_s: float = option(50.0, "Bandwidth of a link in one direction [GB/s].")
    learning_rate: float = option(0.1, "Learning rate of the global batch at the first number of ranks.", least=0)
    seed: int = seed_of("parameters and samples")


@dataclass(frozen=True)
class Scaled:
    """One number of ranks under one rule. ``local[rank]``: samples of a rank and step."""

    rule: str
    world: int
    local: Sequence[int]

    @property
    def total(self) -> int:
        """Samples of a step on all ranks."""
        return sum(self.local)


def run(arguments: Arguments) -> Experiment:
    """Scale both ways. UsageError for sizes that make no sense."""
    model = _checked(arguments)
    fixed = [Scaled("fixed global", world, even_splits(arguments.global_batch, world)) for world in arguments.worlds]
    grown = [Scaled("fixed local", world, [arguments.local_batch] * world) for world in arguments.worlds]
    checks = [*_gradient_checks(arguments, model), *_count_checks(arguments, fixed, grown)]
    return Experiment(
        name="batch",
        title=TITLE,
        about="Data parallelism averages the gradients of W ranks. Either the ranks share a batch, or each brings a batch of its own.",
        arguments=values(arguments),
        verdict=_verdict(arguments, fixed, grown),
        tables=[*_scaling_tables(arguments, fixed), *_scaling_tables(arguments, grown), _gradient_table(arguments, model)],
        checks=checks,
        notes=[
            "Times are a model: micro-batches one after the other, then an all-reduce that nothing hides. Overlap makes a step faster.",
            "With W times the global batch a common rule is W times the learning rate after a warm-up; it holds until gradients have "
            "little noise left.",
            "DDP divides by W, whatever each rank's batch was: with uneven batches its mean is not the mean over samples.",
        ],
    )


def _checked(a: Arguments) -> LinearStack:
    check(a)
    if not a.worlds or not all(1 <= world <= MOST_WORLD for world in a.worlds):
        raise UsageError(f"--worlds {','.join(map(str, a.worlds)) or 'is empty'}", f"give numbers of ranks from 1 to {MOST_WORLD}")
    if not 0 < a.bandwidth_gb_s < 1e9:
        raise UsageError(f"--bandwidth-gb-s {a.bandwidth_gb_s:g}", "give a bandwidth above 0")
    if a.global_batch < max(a.worlds):
        raise UsageError(
            f"--global-batch {a.global_batch} leaves some of {max(a.worlds)} ranks without a sample", "give at least a sample a rank"
        )
    within(len(a.worlds), 64, "numbers of ranks", "give fewer")
    model = LinearStack(layers_from_text(a.layers))
    model.refuse_large(1, a.global_batch, 4_000_000)
    return model


def _times(arguments: Arguments, one: Scaled) -> tuple[int, float, float]:
    """(micro-batches of the busiest rank, compute time, all-reduce time [ms])."""
    most = max(one.local)
    micro_batches = math.ceil(most / arguments.micro_batch)
    compute = most * arguments.sample_ms + micro_batches * arguments.overhead_ms
    rates = (arguments.latency_us / 1e6, 1 / (arguments.bandwidth_gb_s * 1e9))
    return micro_batches, compute, 1e3 * seconds("all_reduce", "ring", one.world, arguments.gradient_bytes, *rates)


def _scaling_tables(arguments: Arguments, rows: Sequence[Scaled]) -> list[Table]:
    times = [_times(arguments, one) for one in rows]
    step = [compute + reduce for _, compute, reduce in times]
    steps = [math.ceil(arguments.samples / one.total) for one in rows]
    rate = [one.total / time * 1e3 if time else None for one, time in zip(rows, step, strict=True)]
    epoch = [count * time / 1e3 for count, time in zip(steps, step, strict=True)]
    ideal = [one.world / rows[0].world for one in rows]
    speedup = [epoch[0] / time if time else None for time in epoch]
    ranks = ("Ranks", [one.world for one in rows])
    sizes: Columns = {
        "world": ranks,
        "global_batch": ("Global batch", [one.total for one in rows]),
        "local_batch": ("Local batch, most", [max(one.local) for one in rows]),
        "micro_batches": ("Micro-batches", [count for count, _, _ in times]),
        "steps": ("Steps an epoch", steps),
        "learning_rate": ("Learning rate, scaled", [arguments.learning_rate * one.total / rows[0].total for one in rows]),
    }
    costs: Columns = {
        "world": ranks,
        "compute": ("Compute [ms]", [compute for _, compute, _ in times]),
        "all_reduce": ("All-reduce [ms]", [reduce for _, _, reduce in times]),
        "step": ("Step [ms]", step),
        "samples_per_s": ("Samples/s", rate),
        "epoch": ("Epoch [s]", epoch),
        "speedup": ("Speed-up", speedup),
        "efficiency": ("Efficiency", [None if s is None else s / i for s, i in zip(speedup, ideal, strict=True)]),
    }
    what = "Strong scaling: the same gradient, less work a rank." if rows[0].rule == "fixed global" else "Weak scaling: a larger batch."
    none = dict.fromkeys(("samples_per_s", "speedup", "efficiency"), "a step takes no time")
    name, against = f"{rows[0].rule.capitalize()} batch", "Speed-up and efficiency of an epoch, against the first row."
    return [table(f"{name}: samples and steps", sizes, what), table(f"{name}: times", costs, against, missing=none)]


def _averaged(model: LinearStack, parameters: Values, samples: Samples, local: Sequence[int], weighted: bool) -> tuple[Values, Network]:
    """Gradients that an all-reduce over the ranks gives: the sum over W, or (``weighted``) the mean over samples."""
    network, ends = Network(len(local), 8), np.cumsum([0, *local]).tolist()
    own = [model.gradients(parameters, samples.x[begin:end], samples.target[begin:end]) for begin, end in pairwise(ends)]
    found: Values = {}
    for name in parameters:
        scale = [count / sum(local) if weighted else 1 / len(local) for count in local]
        parts = [mine[name] * factor for mine, factor in zip(own, scale, strict=True)]
        found[name] = np.asarray(network.all_reduce(parts, range(len(local)))[0], np.float64)
    return found, network


def _uneven(count: int, world: int) -> list[int]:
    """Batches as a loader leaves them at the end of an epoch: full ones, and a last rank with what is left (at least one)."""
    each = math.ceil(count / world)
    full = [each] * (world - 1)
    return [*full, count - sum(full)] if count > sum(full) else even_splits(count, world)


def _gradient_errors(arguments: Arguments, model: LinearStack) -> list[tuple[str, int, str, float]]:
    """(case, ranks, local batches, largest error against one process) for the first few numbers of ranks."""
    (samples,) = batches(model, arguments.global_batch, 1, arguments.seed)
    parameters = model.initial(arguments.seed)
    alone, found = model.gradients(parameters, samples.x, samples.target), []
    for world in [world for world in arguments.worlds if world <= 32]:
        splits = even_splits(arguments.global_batch, world)
        cases = {"even": splits} if len(set(splits)) == 1 else {}
        uneven = _uneven(arguments.global_batch - 1 if cases else arguments.global_batch, world)
        if len(set(uneven)) > 1:
            cases["uneven"] = uneven
        for case, local in cases.items():
            part = Samples(samples.x[: sum(local)], samples.target[: sum(local)])
            whole = alone if sum(local) == arguments.global_batch else model.gradients(parameters, part.x, part.target)
            for weighted in (False, True) if case == "uneven" else (False,):
                gradient, _ = _averaged(model, parameters, part, local, weighted)
                name = f"{case}, weighted by samples" if weighted else case
                shown = ", ".join(map(str, local[:6])) + (", ..." if len(local) > 6 else "")
                found.append((name, world, shown, largest_error(gradient, whole)))
    return found


def _gradient_table(arguments: Arguments, model: LinearStack) -> Table:
    rows = _gradient_errors(arguments, model)
    columns: Columns = {
        "case": ("Local batches", [case for case, *_ in rows]),
        "world": ("Ranks", [world for _, world, *_ in rows]),
        "local": ("Samples of each rank", [local for *_, local, _ in rows]),
        "error": ("Largest error of the averaged gradient", [error for *_, error in rows]),
    }
    note = "Against one process on all samples at once. Even: the mean of means is the mean. Uneven: only when weighted by samples."
    return table("Is it the same gradient?", columns, note)


def _gradient_checks(arguments: Arguments, model: LinearStack) -> list[Check]:
    text = "the mean of means is the mean over samples where all ranks have as many, or are weighted"
    return [
        Check(f"{case}, W = {world}: error of the gradient", error, 0.0, "", text, GRADIENT_TOLERANCE)
        for case, world, _, error in _gradient_errors(arguments, model)
        if case != "uneven"
    ]


def _count_checks(arguments: Arguments, fixed: Sequence[Scaled], grown: Sequence[Scaled]) -> list[Check]:
    found = [Check(f"fixed global, W = {one.world}: samples of a step", one.total, arguments.global_batch, "samples", "G") for one in fixed]
    return found + [
        Check(f"fixed local, W = {one.world}: samples of a step", one.total, one.world * arguments.local_batch, "samples", "W B")
        for one in grown
    ]


def _verdict(arguments: Arguments, fixed: Sequence[Scaled], grown: Sequence[Scaled]) -> str:
    texts = []
    for rows in (fixed, grown):
        last = rows[-1]
        _, compute, reduce = _times(arguments, last)
        share = f"{reduce / (compute + reduce):.0%}" if compute + reduce else "none"
        steps = math.ceil(arguments.samples / last.total)
        texts.append(f"{last.rule} on {last.world} ranks: batch {last.total}, {steps} steps an epoch, {share} of a step is the all-reduce")
    return capitalized("; ".join(texts) + ".")
