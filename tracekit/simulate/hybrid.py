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
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from tracekit.collectives.purpose import role_of_axis
from tracekit.errors import UsageError
from tracekit.findings import Table
from tracekit.mesh.mesh import Axis, coordinate, groups_of_axis, parse_mesh
from tracekit.simulate.arguments import bytes_of_element, check, option, values, within
from tracekit.simulate.experiment import Check, Experiment
from tracekit.simulate.tables import Columns, table
from tracekit.simulate.virtual import Network, Tags, even_splits
from tracekit.units import format_bytes

TITLE = "Hybrid parallelism: what each axis sends in one micro-batch"
EXAMPLE = "tracekit simulate hybrid --mesh pp=2,dp_shard=2,cp=2,tp=2 --layers 4 -o hybrid.html"
MOST_RANKS, MOST_MOVED = 256, 5 * 10**7
#: Bytes of the number of tokens that a rank sends to each expert.
COUNT_BYTES = 8


@dataclass(frozen=True)
class Arguments:
    """What can be chosen."""

    mesh: str = option("pp=2,dp_shard=2,tp=2", "Axes and sizes, outermost first: pp, dp_replicate, dp_shard, ep, cp, tp.")
    rank: int = option(0, "The rank whose traffic is shown.", least=0)
    gpus_per_node: int = option(8, "Consecutive ranks on one node.", most=4096)
    layers: int = option(4, "Layers L of the model.", most=128)
    hidden: int = option(32, "Hidden size h.", most=4096)
    ffn: int = option(0, "Hidden size of the MLP or of an expert; 0: 4 h.", least=0, most=32768)
    vocabulary: int = option(128, "Tokens of the vocabulary; embedding on the first stage, head on the last.", most=100_000)
    sequence: int = option(32, "Tokens s of a sequence.", most=65536)
    micro_batch_size: int = option(1, "Sequences b of a micro-batch.", most=1024)
    experts: int = option(0, "Experts of a layer; 0: a plain MLP, or where there is an ep axis as many as it has ranks.", least=0, most=512)
    top_k: int = option(2, "Experts of a token.", most=64)
    sequence_parallel: bool = option(False, "Between its linears tp keeps shares of the tokens: all-gather and reduce-scatter.")
    reshard_after_forward: bool = option(True, "Gathered parameters are freed after forward, and gathered again in backward.")
    element_bytes: int = bytes_of_element("of parameters and activations")
    gradient_bytes: int = option(4, "Bytes of one element of a gradient that is reduced.", choices=(2, 4, 8))


class Sent(NamedTuple):
    """One collective of the followed rank. ``often``: every micro-batch, or once a step."""

    axis: str
    kind: str
    purpose: str
    phase: str
    label: str
    full_bytes: int
    sent_bytes: int
    often: str


EVERY, ONCE = "every micro-batch", "once a step"


class Job:
    """The ranks of one stage at work side by side; what the followed rank sends is kept in ``sent``."""

    def __init__(self, arguments: Arguments, axes: Sequence[Axis]) -> None:
        self.a, self.axes = arguments, axes
        self.world = math.prod(axis.size for axis in axes)
        self.network = Network(self.world, arguments.element_bytes)
        self.sent: list[Sent] = []
        self.wrong = 0
        self.stage_axis = next((axis for axis in axes if role_of_axis(axis.name) == "pipeline" and axis.size > 1), None)
        self.stages = self.stage_axis.size if self.stage_axis is not None else 1
        self.stage = coordinate(arguments.rank, axes)[list(axes).index(self.stage_axis)] if self.stage_axis is not None else 0
        self.experts = arguments.experts or (self.size("expert") if self.size("expert") > 1 else 0)
        self.sharding = self.names("sharding", "context", "expert") if self.names("sharding") else []
        self.local_tokens = arguments.sequence * arguments.micro_batch_size // self.size("context")

    def names(self, *roles: str, least: int = 2) -> list[str]:
        """Axes of these roles that have more than one rank, in the mesh's order."""
        return [axis.name for axis in self.axes if role_of_axis(axis.name) in roles and axis.size >= least]

    def size(self, *roles: str) -> int:
        """Ranks along all axes of these roles together."""
        return math.prod(axis.size for axis in self.axes if role_of_axis(axis.name) in roles)

    @property
    def own_layers(self) -> int:
        """Layers of the followed rank's stage."""
        return even_splits(self.a.layers, self.stages)[self.stage]

    def units(self) -> list[tuple[str, int, bool]]:
        """(name, elements on one tensor rank, whether it is of experts alone) of what is gathered together on this stage, in order."""
        h, ffn, tp = self.a.hidden, self.a.ffn or 4 * self.a.hidden, self.size("tensor")
        ends = (self.a.vocabulary * h if self.stage == 0 else 0) + (self.a.vocabulary * h + h if self.stage == self.stages - 1 else 0)
        found = [("root", ends, False)] if ends else []
        for layer in range(self.own_layers):
            mlp = 2 * h * ffn // tp
            if self.experts:
                found.append((f"layer {layer + 1}", 4 * h * h // tp + 2 * h + h * self.experts, False))
                found.append((f"layer {layer + 1}, experts", self.experts // self.size("expert") * mlp, True))
            else:
                found.append((f"layer {layer + 1}", 4 * h * h // tp + 2 * h + mlp, False))
        return found

    def micro_batch(self) -> None:
        """Forward and backward of one micro-batch; the gradients of a unit are reduced behind its backward, the root's last."""
        units, reshard = self.units(), self.a.reshard_after_forward
        layers = [f"layer {layer + 1}" for layer in range(self.own_layers)]
        of_layer = {layer: [unit for unit in units if unit[0].split(",")[0] == layer] for layer in ["root", *layers]}
        for layer in ["root", *layers]:
            for unit in of_layer[layer]:
                self.gather(*unit, "forward", EVERY if reshard else ONCE)
            if layer != "root":
                self._layer(layer, "forward")
        self._to_stage(1, "forward", "activation")
        for layer in [*reversed(layers), "root"]:
            for unit in of_layer[layer]:
                if reshard and layer != "root":
                    self.gather(*unit, "backward", EVERY)
            if layer != "root":
                self._layer(layer, "backward")
            for unit in reversed(of_layer[layer]):
                self.reduce(*unit)
        self._to_stage(-1, "backward", "gradient of an activation")

    def _layer(self, layer: str, phase: str) -> None:
        for block in ("attention", "mlp") if phase == "forward" else ("mlp", "attention"):
            if block == "attention":
                self._context(layer, phase)
            elif self.experts:
                self._experts(layer, phase)
            self._tensor(f"{layer}, {block}", phase)

    def _tensor(self, label: str, phase: str) -> None:
        """The partial sums of a block; with sequence parallel its input is gathered before it as well."""
        elements, tp = self.local_tokens * self.a.hidden, self.names("tensor")
        if not self.a.sequence_parallel:
            self.move("all_reduce", tp, elements, "tensor_parallel", phase, label)
            return
        self.move("all_gather", tp, elements, "sequence_parallel", phase, label)
        self.move("reduce_scatter", tp, elements, "sequence_parallel", phase, label)

    def _context(self, layer: str, phase: str) -> None:
        elements = 2 * self.a.sequence * self.a.micro_batch_size * self.a.hidden // self.size("tensor")
        self.move("all_gather", self.names("context"), elements, "context_parallel", phase, f"{layer}, keys and values")
        if phase == "backward":
            label = f"{layer}, gradients of keys and values"
            self.move("reduce_scatter", self.names("context"), elements, "context_parallel", phase, label)

    def _experts(self, layer: str, phase: str) -> None:
        axis, elements = self.names("expert"), self.a.top_k * self.local_tokens * self.a.hidden
        there, back = ("expert_dispatch", "expert_combine") if phase == "forward" else ("expert_combine", "expert_dispatch")
        if phase == "forward":
            self.move("all_to_all", axis, self.experts, there, phase, f"{layer}, counts", width=COUNT_BYTES)
        self.move("all_to_all", axis, elements, there, phase, f"{layer}, tokens to experts")
        self.move("all_to_all", axis, elements, back, phase, f"{layer}, tokens back")

    def shard_axes(self, expert: bool) -> list[str]:
        """Axes over which a unit's parameters are sharded; experts not over their own axis."""
        return [name for name in self.sharding if not (expert and role_of_axis(name) == "expert")]

    def gather(self, name: str, elements: int, expert: bool, phase: str, often: str) -> None:
        """All-gather a unit's parameters over the axes that share them."""
        self.move("all_gather", self.shard_axes(expert), elements, "parameter_gather", phase, name, often=often)

    def copy_axes(self, expert: bool) -> list[str]:
        """Axes whose ranks have copies of a unit's shards."""
        return self.names("data") if self.sharding else self.names("data", "context", *(() if expert else ("expert",)))

    def ranks_of(self, names: Sequence[str]) -> int:
        """Ranks of a group over these axes."""
        return math.prod(axis.size for axis in self.axes if axis.name in names)

    def reduce(self, name: str, elements: int, expert: bool) -> None:
        """Gradients of a unit: scattered over the axes that share it, summed over those that have copies."""
        shared, width = self.shard_axes(expert), self.a.gradient_bytes
        self.move("reduce_scatter", shared, elements, "gradient_scatter", "backward", name, width, ONCE)
        shard = -(-elements // self.ranks_of(shared))
        self.move("all_reduce", self.copy_axes(expert), shard, "gradient_sync", "backward", name, width, ONCE)

    @property
    def boundary_bytes(self) -> int:
        """Bytes of the activation between two stages on one rank."""
        shares = self.size("tensor") if self.a.sequence_parallel else 1
        return self.local_tokens * self.a.hidden // shares * self.a.element_bytes

    def _to_stage(self, step: int, phase: str, what: str) -> None:
        """Send to the next stage, or to the one before."""
        if self.stage_axis is None or not 0 <= self.stage + step < self.stages:
            return
        name, rank = self.stage_axis.name, self.a.rank
        group = next(g for g in groups_of_axis(self.axes, [name]) if rank in g)
        array, before = np.ones(self.boundary_bytes // self.a.element_bytes), int(self.network.sent_bytes[rank])
        self.network.send(rank, group[self.stage + step], array, what, axis=name, purpose="pipeline", phase=phase)
        sent = int(self.network.sent_bytes[rank]) - before
        self.sent.append(Sent(name, "send", "pipeline", phase, what, self.boundary_bytes, sent, EVERY))

    def move(
        self,
        kind: str,
        axes: Sequence[str],
        elements: int,
        purpose: str,
        phase: str,
        label: str,
        width: int | None = None,
        often: str = EVERY,
    ) -> None:
        """One collective over (joined) axes in the followed rank's group: arrays of that many elements in full."""
        group = next((g for g in groups_of_axis(self.axes, axes) if self.a.rank in g), ()) if axes else ()
        x, name, bytes_each = len(group), "_".join(axes), width or self.a.element_bytes
        if x < 2:
            return
        before = int(self.network.sent_bytes[self.a.rank])
        tags: Tags = {"axis": name, "purpose": purpose, "phase": phase, "label": label, "element_bytes": bytes_each}
        padded = -(-elements // x) * x
        if kind == "all_gather":
            got = self.network.all_gather([np.ones(padded // x)] * x, group, **tags)
            self.wrong += sum(len(one) != padded for one in got)
        elif kind == "all_to_all":
            self.network.all_to_all([[np.ones(n) for n in even_splits(elements, x)]] * x, group, **tags)
            padded = elements
        else:
            inputs = [np.ones(padded)] * x
            reduce = kind == "all_reduce"
            sums = self.network.all_reduce(inputs, group, **tags) if reduce else self.network.reduce_scatter(inputs, group, **tags)
            self.wrong += sum(int((one != x).sum()) for one in sums)
        sent = int(self.network.sent_bytes[self.a.rank]) - before
        self.sent.append(Sent(name, kind, purpose, phase, label, padded * bytes_each, sent, often))


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
        tables=[_axis_table(job), _kind_table(job), _calls_table(job)],
        checks=_checks(job),
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


def _expected(job: Job) -> dict[tuple[str, str], tuple[Fraction, str]]:
    """(axis, purpose) -> (bytes that the rank sends, closed form), from the sizes alone."""
    a, n, layers, e = job.a, job.local_tokens, job.own_layers, job.a.element_bytes

    def f(x: int) -> Fraction:
        return Fraction(x - 1, x)

    found: dict[tuple[str, str], tuple[Fraction, str]] = {}
    tp, cp, ep = job.size("tensor"), job.size("context"), job.size("expert")
    mode = "sequence_parallel" if a.sequence_parallel else "tensor_parallel"
    for name in job.names("tensor"):
        found[name, mode] = (8 * layers * f(tp) * n * a.hidden * e, "4 l 2 F(t) n h e")
    for name in job.names("context"):
        keys = 2 * a.sequence * a.micro_batch_size * a.hidden // tp * e
        found[name, "context_parallel"] = (3 * layers * f(cp) * keys, "3 l F(c) 2 s b h/t e")
    for name in job.names("expert"):
        tokens, counts = 2 * layers * f(ep) * a.top_k * n * a.hidden * e, layers * f(ep) * job.experts * COUNT_BYTES
        found[name, "expert_dispatch"] = (tokens + counts, "2 l F(ep) k n h e + l F(ep) E 8")
        found[name, "expert_combine"] = (tokens, "2 l F(ep) k n h e")
    for name, elements, expert in job.units():
        shared = job.shard_axes(expert)
        copies, w = job.copy_axes(expert), job.ranks_of(shared)
        padded, times = -(-elements // w) * w, 2 if a.reshard_after_forward and name != "root" else 1
        r = job.ranks_of(copies)
        for axis, purpose, size, text in (
            (shared, "parameter_gather", f(w) * times * padded * e, "F(W) N e, twice where resharded"),
            (shared, "gradient_scatter", f(w) * padded * a.gradient_bytes, "F(W) N g"),
            (copies, "gradient_sync", 2 * f(r) * (-(-(padded // w) // r) * r) * a.gradient_bytes, "2 F(R) N/W g"),
        ):
            if size:
                key = ("_".join(axis), purpose)
                found[key] = (found.get(key, (Fraction(0), ""))[0] + size, text)
    ends = (job.stage > 0) + (job.stage + 1 < job.stages)
    if job.stage_axis is not None:
        found[job.stage_axis.name, "pipeline"] = (Fraction(ends * job.boundary_bytes), "n h e to each neighbour")
    return found


def _checks(job: Job) -> list[Check]:
    counted: Counter[tuple[str, str]] = Counter()
    for one in job.sent:
        counted[one.axis, one.purpose] += one.sent_bytes
    found = [
        Check(f"{axis}, {purpose.replace('_', ' ')}: bytes sent", counted[axis, purpose], expected, "bytes", formula)
        for (axis, purpose), (expected, formula) in _expected(job).items()
    ]
    return [*found, Check("elements that came out wrong", job.wrong, 0, "elements", "a sum of ones over x ranks is x; all parts arrive")]


def _axes_of(job: Job) -> list[str]:
    return list(dict.fromkeys(one.axis for one in job.sent))


def _group(job: Job, axis: str) -> tuple[int, ...]:
    return next(g for g in groups_of_axis(job.axes, [a.name for a in job.axes if f"_{a.name}_" in f"_{axis}_"]) if job.a.rank in g)


def _axis_table(job: Job) -> Table:
    """One row an axis: who is in the group, what the rank sends, how much of all."""
    axes = _axes_of(job)
    rows = {axis: [one for one in job.sent if one.axis == axis] for axis in axes}
    total = sum(one.sent_bytes for one in job.sent)
    groups = {axis: _group(job, axis) for axis in axes}

    def sent(axis: str, *, phase: str = "", often: str = "") -> int:
        return sum(one.sent_bytes for one in rows[axis] if phase in ("", one.phase) and often in ("", one.often))

    columns: Columns = {
        "axis": ("Axis", axes),
        "size": ("Ranks", [len(groups[axis]) for axis in axes]),
        "nodes": ("Nodes of the group", [len({rank // job.a.gpus_per_node for rank in groups[axis]}) for axis in axes]),
        "calls": ("Calls", [len(rows[axis]) for axis in axes]),
        "forward": ("Sent in forward [B]", [sent(axis, phase="forward") for axis in axes]),
        "backward": ("Sent in backward [B]", [sent(axis, phase="backward") for axis in axes]),
        "every": ("Of it every micro-batch [B]", [sent(axis, often=EVERY) for axis in axes]),
        "once": ("Once a step [B]", [sent(axis, often=ONCE) for axis in axes]),
        "share": ("Of all bytes [share]", [sent(axis) / total for axis in axes]),
    }
    place = ", ".join(f"{axis.name} {index}" for axis, index in zip(job.axes, coordinate(job.a.rank, job.axes), strict=True))
    note = f"Rank {job.a.rank} ({place}), {job.own_layers} of {job.a.layers} layers, {job.local_tokens} tokens of the micro-batch."
    return table("What each axis sends in one micro-batch", columns, note)


def _kind_table(job: Job) -> Table:
    """One row a sort of collective."""
    sorts = list(dict.fromkeys((one.axis, one.kind, one.purpose, one.often) for one in job.sent))
    rows = [[one for one in job.sent if (one.axis, one.kind, one.purpose, one.often) == sort] for sort in sorts]
    columns: Columns = {
        "axis": ("Axis", [axis for axis, *_ in sorts]),
        "kind": ("Collective", [kind for _, kind, *_ in sorts]),
        "purpose": ("For", [purpose for _, _, purpose, _ in sorts]),
        "often": ("How often", [often for *_, often in sorts]),
        "forward": ("Calls in forward", [sum(one.phase == "forward" for one in found) for found in rows]),
        "backward": ("In backward", [sum(one.phase == "backward" for one in found) for found in rows]),
        "largest": ("Largest full tensor [B]", [max(one.full_bytes for one in found) for found in rows]),
        "sent": ("Sent by the rank [B]", [sum(one.sent_bytes for one in found) for found in rows]),
    }
    return table("By collective and purpose", columns)


def _calls_table(job: Job) -> Table:
    columns: Columns = {
        "number": ("No.", range(1, len(job.sent) + 1)),
        "phase": ("Phase", [one.phase for one in job.sent]),
        "label": ("What", [one.label for one in job.sent]),
        "axis": ("Axis", [one.axis for one in job.sent]),
        "kind": ("Collective", [one.kind for one in job.sent]),
        "full_bytes": ("Full tensor [B]", [one.full_bytes for one in job.sent]),
        "sent_bytes": ("Sent by the rank [B]", [one.sent_bytes for one in job.sent]),
    }
    return table("Every collective of the rank", columns, shown=0)


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
    crossing = [axis for axis in _axes_of(job) if len({rank // job.a.gpus_per_node for rank in _group(job, axis)}) > 1]
    if crossing:
        notes.append(f"Crosses nodes of {job.a.gpus_per_node} ranks: {', '.join(crossing)}.")
    if job.experts and job.names("expert"):
        notes.append("Tokens are spread evenly over the experts; a real router sends more to some (tracekit simulate experts).")
    return notes
