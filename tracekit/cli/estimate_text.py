"""The estimate in a terminal: the answer, memory by rank role, communication by axis, the step, and what else there is to know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, TYPE_CHECKING

from rich.text import Text

from tracekit.cli.terminal import console, grid, print_grid, text
from tracekit.estimate.notes import notes
from tracekit.estimate.time import row_seconds
from tracekit.estimate.timeline import CATEGORIES
from tracekit.report.estimate import role_label, sentence
from tracekit.report.quantity import quantity
from tracekit.report.text import visible
from tracekit.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from tracekit.estimate.estimate import Estimate, Role
    from tracekit.estimate.fit import Candidate
    from tracekit.estimate.spec import Spec

MOST_MESHES, MOST_REASONS = 20, 10
_US = 1e6


def print_estimate(result: Estimate, page: str | None, stream: IO[str]) -> None:
    """Print the whole estimate; ``page`` is where the HTML was written."""
    out, plan = console(stream), result.plan
    names = (result.shape.name, plan.mesh.text(), plan.strategy.name, plan.recipe.name, result.hardware.name)
    out.print(text(" · ".join(names)))
    out.print(Text(visible(sentence(result)), "bold"))
    _memory(out, result.roles, result.hardware.memory_bytes)
    _communication(out, result)
    _step(out, result)
    for note in notes(result):
        out.print(Text(f"- {visible(note)}", "dim"))
    if page is not None:
        out.print(Text(f"Page: {visible(page)}", "bold"), soft_wrap=True)


def print_role(role: Role, spec: Spec, stream: IO[str]) -> None:
    """Print what is known of a module: model state and the data-parallel collectives."""
    out = console(stream)
    out.print(Text(f"{role.elements:,} parameters · {spec.plan.mesh.text()} · {spec.plan.strategy.name} · {spec.plan.recipe.name}"))
    _memory(out, (role,), spec.hardware.memory_bytes)
    table = grid(["axis", "purpose", "kind", "calls", "full", "sent"], 3)
    for row in role.traffic:
        sizes = (format_bytes(row.full_bytes), format_bytes(row.sent_bytes))
        table.add_row(row.axis, row.purpose, row.kind, str(row.calls), *sizes)
    print_grid(out, "Communication of a rank and step", table)
    out.print(Text("- activations and FLOP are not known of a module alone: record a step, or give the model's sizes", "dim"))


def print_fit(candidates: Sequence[Candidate], answer: str, page: str | None, stream: IO[str]) -> None:
    """Print the fastest meshes that fit, and why the nearest others do not."""
    out = console(stream)
    out.print(Text(visible(answer), "bold"))
    fit = [candidate for candidate in candidates if candidate.fits]
    rest = [candidate for candidate in candidates if not candidate.fits]
    table = grid(["mesh", "settings", "micro-batches", "step", "MFU", "memory"], 2)
    for c in fit[:MOST_MESHES]:
        step = quantity(None if c.seconds is None else c.seconds * _US, "us")
        memory = quantity(c.peak, "bytes") + (" tight" if c.tight else "")
        table.add_row(c.mesh.text(), c.settings(), str(c.micro_batches), step, quantity(c.mfu, "share"), memory)
    if fit:
        print_grid(out, "Fastest first" + _more(len(fit), MOST_MESHES), table)
    others = grid(["mesh", "why not"], 2)
    for c in rest[:MOST_REASONS]:
        others.add_row(c.mesh.text(), visible(c.reason))
    if rest:
        print_grid(out, "These do not fit" + _more(len(rest), MOST_REASONS), others)
    if page is not None:
        out.print(Text(f"Page: {visible(page)}", "bold"), soft_wrap=True)


def _more(count: int, shown: int) -> str:
    return f" ({shown} of {count}; --json holds all)" if count > shown else ""


def _memory(out: Console, roles: Sequence[Role], device_bytes: int) -> None:
    """One column a role, one line a category."""
    table = grid(["", *(role_label(role) for role in roles)], 1)
    for category in CATEGORIES:
        sizes = [role.memory.peak.bytes[category] for role in roles]
        if any(sizes):
            table.add_row(category.replace("_", " "), *(quantity(size, "bytes") for size in sizes))
    table.add_row(Text("peak", "bold"), *(Text(format_bytes(role.peak_bytes), "bold") for role in roles))
    table.add_row("at", *(" ".join(filter(None, (role.memory.peak.phase, role.memory.peak.unit))) for role in roles))
    too_much = [role.memory.reserved > device_bytes for role in roles]
    reserved = [Text(format_bytes(role.memory.reserved), "bold red" if over else "") for role, over in zip(roles, too_much, strict=True)]
    table.add_row("reserved", *reserved)
    table.add_row("device", *(format_bytes(device_bytes) for _ in roles))
    print_grid(out, "Memory of a rank at its peak", table)


def _communication(out: Console, result: Estimate) -> None:
    """One line an axis, purpose and kind, for the role that sends most."""
    role = max(result.roles, key=lambda role: sum(row.sent_bytes for row in role.traffic))
    groups: dict[tuple[str, str, str, int], list[float]] = {}
    for row in role.traffic:
        sums = groups.setdefault((row.axis, row.purpose, row.kind, row.size), [0, 0, 0, 0.0])
        seconds = row_seconds(row, result.hardware, result.assumptions.latency)
        for place, value in enumerate((row.calls, row.calls * row.full_bytes, row.sent_bytes, seconds)):
            sums[place] += value
    if not groups:
        out.print()
        out.print(Text("Nothing is sent: one rank, or nothing to share."))
        return
    table = grid(["axis", "purpose", "kind", "ranks", "calls", "full", "sent", "time"], 3)
    for (axis, purpose, kind, size), (calls, full, sent, seconds) in groups.items():
        figures = (f"{int(calls)}", format_bytes(full), format_bytes(sent), quantity(seconds * _US, "us"))
        table.add_row(axis, purpose, kind, str(size), *figures)
    where = "" if role.name == "only" else f", {role_label(role)}"
    print_grid(out, f"Communication of a rank and step{where}", table)


def _step(out: Console, result: Estimate) -> None:
    step, how = result.step, result.assumptions
    table = grid(["compute", "exposed comm", "bubble", "optimizer", "step", "MFU", "HFU"], 0)
    parts = (step.compute, step.exposed, step.bubble, step.optimizer, step.total)
    table.add_row(*(quantity(part * _US, "us") for part in parts), quantity(result.mfu, "share"), quantity(result.hfu, "share"))
    peak = result.hardware.peak_flops(result.plan.recipe.compute) / 1e12
    print_grid(out, f"Predicted step at {how.efficiency:.0%} of {peak:,.0f} TFLOP/s, {how.overlap:.0%} overlap", table)
    shares = result.bubble_shares
    if shares is not None:
        out.print(Text(f"  bubble of equal stages: {shares[0]:.1%} of the ideal time, {shares[1]:.1%} of the wall time"))
