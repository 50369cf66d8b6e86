"""Which rank sees which samples in which epoch: the distributed sampler of data parallelism, padding and shuffling included.

The permutation, the padding and the deal are those of ``torch.utils.data.DistributedSampler``: indices of an epoch are permuted with the
seed ``seed + epoch``, repeated from the front until every rank has as many (or cut, with ``drop_last``), and rank r takes every W-th from r
on. ``torch.randperm`` on a CPU is a Fisher-Yates shuffle by the 32-bit Mersenne Twister, which NumPy has as well.
Source: torch/utils/data/distributed.py; aten/src/ATen/native/TensorFactories.cpp, ``randperm_cpu``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekit.findings import Table
from tracekit.simulate.arguments import check, option, seed_of, values
from tracekit.simulate.experiment import Cell, Check, Experiment, Moment
from tracekit.simulate.tables import Columns, table

TITLE = "Distributed sampler: which rank sees which samples"
EXAMPLE = "tracekit simulate sampler --samples 10 --world 4 --epochs 2 -o sampler.html"
_YES = ("yes", "no")
#: Batches that are pictured, and samples listed in one cell.
MOST_PICTURED, MOST_LISTED = 200, 12
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Arguments:
    """What can be chosen."""

    samples: int = option(10, "Samples of the data set.", most=100_000)
    world: int = option(4, "Data-parallel ranks W.", most=256)
    epochs: int = option(2, "Epochs that are shown.", most=50)
    shuffle: str = option("yes", "Permute the samples in every epoch.", _YES)
    set_epoch: str = option("yes", "Whether the loop calls sampler.set_epoch(epoch); without it every epoch has the same order.", _YES)
    drop_last: str = option("no", "Leave out what does not divide by the ranks, in the place of repeating samples.", _YES)
    batch: int = option(2, "Samples of a batch on each rank.", most=10_000)
    drop_last_batch: str = option("no", "Whether the loader leaves out a rank's last batch if it is not full.", _YES)
    sample_bytes: int = option(4096, "Bytes of one sample, for the picture.", least=0, most=10**12)
    seed: int = seed_of("the shuffle")


@dataclass(frozen=True)
class Epoch:
    """One epoch: ``order`` of all indices after shuffling, ``dealt[rank]`` those of a rank, ``repeated`` and ``left_out`` samples."""

    number: int
    order: Indices
    dealt: Sequence[Indices]
    repeated: Indices
    left_out: Indices


def permutation(n: int, seed: int) -> Indices:
    """``torch.randperm(n, generator=torch.Generator().manual_seed(seed))``: position i changes places with one of those from i on."""
    order = np.arange(n, dtype=np.int64)
    twister = np.random.RandomState(seed & 0xFFFFFFFF)
    drawn = twister.randint(0, 2**32, max(0, n - 1), dtype=np.uint32).astype(np.int64)
    for i, z in enumerate((drawn % np.arange(n, 1, -1)).tolist()):
        order[i], order[i + z] = order[i + z], order[i]
    return order


def deal(arguments: Arguments, epoch: int) -> Epoch:
    """The indices of every rank in one epoch."""
    n, world = arguments.samples, arguments.world
    seed = arguments.seed + (epoch if arguments.set_epoch == "yes" else 0)
    order = permutation(n, seed) if arguments.shuffle == "yes" else np.arange(n, dtype=np.int64)
    each = per_rank(n, world, arguments.drop_last == "yes")
    taken = np.resize(order, each * world) if each * world > n else order[: each * world]
    return Epoch(epoch, order, [taken[rank::world] for rank in range(world)], taken[n:], order[each * world :])


def per_rank(samples: int, world: int, drop_last: bool) -> int:
    """Samples of a rank: ceil(n / W), or with ``drop_last`` (where n does not divide) the full rounds, ceil((n - W) / W)."""
    if drop_last and samples % world:
        return max(0, math.ceil((samples - world) / world))
    return math.ceil(samples / world)


def run(arguments: Arguments) -> Experiment:
    """Deal out all epochs. UsageError for sizes out of range."""
    check(arguments)
    epochs = [deal(arguments, number) for number in range(arguments.epochs)]
    return Experiment(
        name="sampler",
        title=TITLE,
        about="Every rank permutes all indices in the same way, and takes every W-th of them: no message is needed to agree.",
        arguments=values(arguments),
        verdict=_verdict(arguments, epochs),
        tables=[_ranks_table(arguments, epochs), _epochs_table(arguments, epochs), _samples_table(arguments, epochs)],
        moments=_moments(arguments, epochs),
        checks=_checks(arguments, epochs),
        notes=_notes(arguments),
    )


def _batches(arguments: Arguments, dealt: Indices) -> list[Indices]:
    batches = [dealt[begin : begin + arguments.batch] for begin in range(0, len(dealt), arguments.batch)]
    return [one for one in batches if len(one) == arguments.batch or arguments.drop_last_batch == "no"]


def _text(indices: Sequence[int] | Indices) -> str:
    shown = ", ".join(str(index) for index in indices[:MOST_LISTED])
    return f"{shown}, ... ({len(indices)})" if len(indices) > MOST_LISTED else shown or "none"


def _ranks_table(arguments: Arguments, epochs: Sequence[Epoch]) -> Table:
    rows = [(epoch, rank, dealt) for epoch in epochs for rank, dealt in enumerate(epoch.dealt)]
    columns: Columns = {
        "epoch": ("Epoch", [epoch.number for epoch, _, _ in rows]),
        "rank": ("Rank", [rank for _, rank, _ in rows]),
        "samples": ("Samples, in order", [_text(dealt) for _, _, dealt in rows]),
        "count": ("Samples", [len(dealt) for _, _, dealt in rows]),
        "batches": ("Batches", [len(_batches(arguments, dealt)) for _, _, dealt in rows]),
        "last": ("In the last batch", [len(b[-1]) if (b := _batches(arguments, dealt)) else 0 for _, _, dealt in rows]),
    }
    return table("What every rank sees", columns, shown=min(64, len(rows)))


def _epochs_table(arguments: Arguments, epochs: Sequence[Epoch]) -> Table:
    first = epochs[0].order
    columns: Columns = {
        "epoch": ("Epoch", [epoch.number for epoch in epochs]),
        "order": ("Order of all samples", [_text(epoch.order) for epoch in epochs]),
        "same": ("Same order as epoch 0", [bool(np.array_equal(epoch.order, first)) for epoch in epochs]),
        "repeated": ("Seen twice, to fill up", [_text(epoch.repeated) for epoch in epochs]),
        "left_out": ("Seen by nobody", [_text(_unseen(arguments, epoch)) for epoch in epochs]),
        "steps": ("Steps", [len(_batches(arguments, epoch.dealt[0])) for epoch in epochs]),
    }
    return table("Epochs", columns)


def _unseen(arguments: Arguments, epoch: Epoch) -> Indices:
    """Samples that no rank trains on in an epoch, batches that are not full included."""
    trained = [index for dealt in epoch.dealt for batch in _batches(arguments, dealt) for index in batch.tolist()]
    return np.setdiff1d(np.arange(arguments.samples), np.array(trained, np.int64))


def _samples_table(arguments: Arguments, epochs: Sequence[Epoch]) -> Table:
    """How often each sample was seen, and by which ranks."""
    seen: list[list[int]] = [[] for _ in range(arguments.samples)]
    for epoch in epochs:
        for rank, dealt in enumerate(epoch.dealt):
            for index in np.concatenate([*_batches(arguments, dealt), np.zeros(0, np.int64)]).tolist():
                seen[index].append(rank)
    columns: Columns = {
        "sample": ("Sample", range(arguments.samples)),
        "times": ("Times seen", [len(ranks) for ranks in seen]),
        "ranks": ("By ranks, in order", [_text(ranks) for ranks in seen]),
    }
    return table("Every sample", columns, shown=min(20, arguments.samples))


def _moments(arguments: Arguments, epochs: Sequence[Epoch]) -> list[Moment]:
    """A picture a step: the samples in every rank's batch."""
    found: list[Moment] = []
    for epoch in epochs:
        batches = [_batches(arguments, dealt) for dealt in epoch.dealt]
        for step in range(len(batches[0])):
            if len(found) == MOST_PICTURED:
                return found
            spare = set(epoch.repeated.tolist())
            late = step == len(batches[0]) - 1
            holds = [[_cell(arguments, index, late and index in spare) for index in mine[step].tolist()] for mine in batches]
            text = "One cell is one sample of the rank's batch; what may be here for the second time is grey."
            found.append(Moment(f"epoch {epoch.number}, step {step + 1}", text, holds))
    return found


def _cell(arguments: Arguments, index: int, again: bool) -> Cell:
    return Cell(f"s{index}", "padding" if again else "input", arguments.sample_bytes, f"sample {index}")


def _checks(arguments: Arguments, epochs: Sequence[Epoch]) -> list[Check]:
    each = per_rank(arguments.samples, arguments.world, arguments.drop_last == "yes")
    checks = []
    for epoch in epochs:
        counts = Counter(index for dealt in epoch.dealt for index in dealt.tolist())
        name, n, taken = f"epoch {epoch.number}", arguments.samples, each * arguments.world
        longest, shortest = max(map(len, epoch.dealt)), min(map(len, epoch.dealt))
        form = "ceil((n-W)/W) W, at least 0" if arguments.drop_last == "yes" and n % arguments.world else "ceil(n/W) W"
        checks += [
            Check(f"{name}: samples dealt out", sum(counts.values()), taken, "samples", form),
            Check(f"{name}: most minus least of a rank", longest - shortest, 0, "samples", "every rank has as many, or some would wait"),
            Check(f"{name}: different samples seen", len(counts), min(n, taken), "samples", "min(n, what is dealt out)"),
        ]
    return checks


def _verdict(arguments: Arguments, epochs: Sequence[Epoch]) -> str:
    first = epochs[0]
    unseen = len(_unseen(arguments, first))
    changed = len({epoch.order.tobytes() for epoch in epochs})
    order = f"{changed} different orders in {len(epochs)} epochs" if len(epochs) > 1 else "one epoch"
    return (
        f"{arguments.samples} samples on {arguments.world} ranks: {len(first.dealt[0])} a rank and epoch, "
        f"{len(first.repeated)} seen twice, {unseen} seen by nobody; {order}."
    )


def _notes(arguments: Arguments) -> list[str]:
    notes = []
    if arguments.shuffle == "yes" and arguments.set_epoch == "no" and arguments.epochs > 1:
        notes.append("Without set_epoch the generator starts from the same seed in every epoch: the order never changes.")
    if arguments.samples % arguments.world and arguments.drop_last == "no":
        notes.append("Samples that fill up the last round are trained on twice: a metric summed over ranks counts them twice as well.")
    if arguments.drop_last == "yes" and arguments.samples % arguments.world:
        notes.append("Which samples are left out changes with the order: over many epochs each has its turn, if the loop calls set_epoch.")
    return notes
