"""What is shown of the followed rank: its traffic by axis, by sort and call by call, beside the closed forms."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

from tracekit.findings import Table
from tracekit.mesh.mesh import coordinate, groups_of_axis
from tracekit.simulate.experiment import Check
from tracekit.simulate.hybrid.job import COUNT_BYTES, EVERY, ONCE, Job
from tracekit.simulate.tables import Columns, table


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


def checks(job: Job) -> list[Check]:
    """Bytes that were counted beside those of the closed forms, and whether everything arrived."""
    counted: Counter[tuple[str, str]] = Counter()
    for one in job.sent:
        counted[one.axis, one.purpose] += one.sent_bytes
    found = [
        Check(f"{axis}, {purpose.replace('_', ' ')}: bytes sent", counted[axis, purpose], expected, "bytes", formula)
        for (axis, purpose), (expected, formula) in _expected(job).items()
    ]
    return [*found, Check("elements that came out wrong", job.wrong, 0, "elements", "a sum of ones over x ranks is x; all parts arrive")]


def axes_of(job: Job) -> list[str]:
    """Axes over which the rank sends something, in order of first use."""
    return list(dict.fromkeys(one.axis for one in job.sent))


def group_of(job: Job, axis: str) -> tuple[int, ...]:
    """Ranks of its group over a (joined) axis."""
    return next(g for g in groups_of_axis(job.axes, [a.name for a in job.axes if f"_{a.name}_" in f"_{axis}_"]) if job.a.rank in g)


def _axis_table(job: Job) -> Table:
    """One row an axis: who is in the group, what the rank sends, how much of all."""
    axes = axes_of(job)
    rows = {axis: [one for one in job.sent if one.axis == axis] for axis in axes}
    total = sum(one.sent_bytes for one in job.sent)
    groups = {axis: group_of(job, axis) for axis in axes}

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


def tables(job: Job) -> list[Table]:
    """All tables."""
    return [_axis_table(job), _kind_table(job), _calls_table(job)]
