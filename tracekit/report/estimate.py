"""The estimate for readers: its charts, and one HTML file that opens from disk."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from tracekit import __version__
from tracekit.estimate.estimate import Estimate, Role
from tracekit.estimate.fit import Candidate
from tracekit.estimate.notes import notes
from tracekit.estimate.timeline import CATEGORIES
from tracekit.files import write_atomically
from tracekit.findings import StackedArea, StackedBars, Table
from tracekit.report import figures
from tracekit.report.estimate_json import all_traffic
from tracekit.report.pages import drawn_page, figure_block, table_block
from tracekit.report.quantity import axis_unit, quantity
from tracekit.units import format_bytes

_US = 1e6
_SCRIPTS = ("unpack.js", "page.js", "tables.js", "charts.js")
_REST = "--json holds all"


def role_label(role: Role) -> str:
    """``first stage (0)``, ``middle stages (1-6)``; ``every rank`` without a pipeline."""
    if role.name == "only":
        return "every rank"
    first, last = role.stages[0], role.stages[-1]
    return f"{role.name} stage {first}" if first == last else f"{role.name} stages {first}–{last}"


def memory_chart(result: Estimate) -> StackedBars:
    """Bytes of each category at the peak of each role; categories that are nowhere are left out."""
    labels = [role_label(role) for role in result.roles]
    series = {
        category.replace("_", " "): [float(role.memory.peak.bytes[category]) for role in result.roles]
        for category in CATEGORIES
        if any(role.memory.peak.bytes[category] for role in result.roles)
    }
    size = format_bytes(result.hardware.memory_bytes)
    return StackedBars("Memory at the peak", labels, series, "bytes", f"The line is the memory of the device, {size}.")


def step_chart(result: Estimate) -> StackedArea:
    """What is allocated at each moment of the step, of the role with the highest peak."""
    role = result.peak
    moments = role.memory.moments
    series = {
        category.replace("_", " "): [float(moment.bytes[category]) for moment in moments]
        for category in CATEGORIES
        if any(moment.bytes[category] for moment in moments)
    }
    backward = next(index for index, moment in enumerate(moments) if moment.phase == "backward")
    marks = [(float(backward), "backward"), (float(len(moments) - 1), "optimizer")]
    later = "; a later micro-batch follows the first" if result.plan.batch.micro_batches > 1 else ""
    note = f"Moments of the program, not times{later}."
    x = [float(index) for index in range(len(moments))]
    return StackedArea(f"Memory over the step, {role_label(role)}", x, series, "bytes", {}, marks, note, "moment")


def communication_chart(result: Estimate) -> StackedBars:
    """Bytes that a rank of each role sends in a step, by axis."""
    axes = list(dict.fromkeys(row.axis for role in result.roles for row in role.traffic))
    labels = [role_label(role) for role in result.roles]
    series = {axis: [float(sum(row.sent_bytes for row in role.traffic if row.axis == axis)) for role in result.roles] for axis in axes}
    return StackedBars("Bytes sent a rank and step, by axis", labels, series, "bytes")


def time_chart(result: Estimate) -> StackedBars:
    """Parts of the predicted step."""
    step = result.step
    parts = {"compute": step.compute, "exposed communication": step.exposed, "idle (bubble)": step.bubble, "optimizer": step.optimizer}
    return StackedBars("Predicted step", ["step"], {name: [seconds * _US] for name, seconds in parts.items()}, "us")


def traffic_table(result: Estimate) -> Table:
    """Every class of collectives with its calls, bytes and time."""
    entries = all_traffic(result)
    columns = {
        "role": "role",
        "axis": "axis",
        "purpose": "purpose",
        "kind": "kind",
        "phase": "phase",
        "size": "ranks",
        "count": "calls",
        "full_bytes": "full tensor [bytes]",
        "sent_bytes": "sent [bytes]",
        "duration_us": "time [us]",
    }
    frame = pd.DataFrame({key: [entry[key] for entry in entries] for key in columns})
    return Table("Collectives a rank and step", frame, columns)


def fit_table(candidates: Sequence[Candidate]) -> Table:
    """Every mesh with its step or its reason."""
    frame = pd.DataFrame(
        {
            "mesh": [c.mesh.text() for c in candidates],
            "settings": [c.settings() or "–" for c in candidates],
            "fits": ["tight" if c.fits and c.tight else "yes" if c.fits else "no" for c in candidates],
            "step_s": [float("nan") if c.seconds is None else c.seconds for c in candidates],
            "mfu": [float("nan") if c.mfu is None else c.mfu for c in candidates],
            "peak": [float("nan") if c.peak is None else float(c.peak) for c in candidates],
            "reason": [c.reason or "–" for c in candidates],
        }
    )
    columns = {"mesh": "mesh", "settings": "settings", "fits": "fits", "step_s": "step [s]", "mfu": "MFU [share]", "peak": "peak [bytes]",
               "reason": "why not"}  # fmt: skip
    return Table("Meshes", frame, columns, missing=dict.fromkeys(("step_s", "mfu", "peak"), "the mesh cannot run"))


def render(result: Estimate, plotly_js: str = "inline") -> str:
    """The page of an estimate."""
    return b"".join(_parts(_content(result), plotly_js)).decode()


def write(path: str | os.PathLike[str], result: Estimate, plotly_js: str = "inline") -> None:
    """Write the page of an estimate; an existing file is replaced only when the new one is whole. Raises OSError."""
    write_atomically(path, _parts(_content(result), plotly_js))


def write_fit(path: str | os.PathLike[str], candidates: Sequence[Candidate], title: str, sentence: str) -> None:
    """Write the page of a search."""
    blocks = [table_block(fit_table(candidates), "t-fit", elsewhere=_REST)]
    content = {"title": title, "sentence": sentence, "facts": [], "blocks": blocks, "notes": []}
    write_atomically(path, _parts(content, "inline"))


def sentence(result: Estimate) -> str:
    """The answer in one line."""
    role = result.peak
    need, have = format_bytes(role.memory.reserved), format_bytes(result.hardware.memory_bytes)
    verdict = "fits" if result.fits else "does not fit"
    mfu = f", {result.mfu:.0%} MFU" if result.mfu is not None else ""
    return f"It {verdict}: at most {need} of {have} a rank; a step takes about {quantity(result.step.total * _US, 'us')}{mfu}."


def _content(result: Estimate) -> dict[str, Any]:
    plan = result.plan
    micro = f"{plan.batch.micro_batches} {'micro-batch' if plan.batch.micro_batches == 1 else 'micro-batches'}"
    facts = [
        ("Model", f"{result.shape.name}, {result.parameters / 1e9:.4g} billion parameters"),
        ("Mesh", f"{plan.mesh.text()} ({plan.mesh.world} ranks)"),
        ("Strategy", f"{plan.strategy.name}, {plan.recipe.name}"),
        ("Batch", f"{plan.global_batch} sequences of {result.shape.sequence} tokens, {micro} a rank"),
        ("Hardware", f"{result.hardware.name}, {result.hardware.inside.name}, {result.hardware.outside.name}"),
    ]
    blocks = [
        _memory_block(result),
        figure_block(step_chart(result), "c-step", figures.figure(step_chart(result))),
        _plot(communication_chart(result), "c-traffic"),
        _plot(time_chart(result), "c-time"),
        table_block(traffic_table(result), "t-traffic", elsewhere=_REST),
    ]
    return {"title": result.shape.name, "sentence": sentence(result), "facts": facts, "blocks": blocks, "notes": notes(result)}


def _memory_block(result: Estimate) -> dict[str, Any]:
    """The memory chart with a line where the device's memory ends."""
    chart = memory_chart(result)
    totals = [float(role.peak_bytes) for role in result.roles]
    _, divisor = axis_unit(totals, "bytes")
    return _plot(chart, "c-memory", result.hardware.memory_bytes / divisor)


def _plot(chart: StackedBars, key: str, line: float | None = None) -> dict[str, Any]:
    drawn = figures.figure(chart)
    if drawn is not None and line is not None:
        style = {"color": "#d64a2a", "width": 2, "dash": "dot"}
        drawn["layout"]["shapes"] = [{"type": "line", "x0": line, "x1": line, "y0": 0, "y1": 1, "yref": "paper", "line": style}]
    return figure_block(chart, key, drawn)


def _parts(content: Mapping[str, Any], plotly_js: str) -> Iterable[bytes]:
    return drawn_page("estimate.html", {**content, "version": __version__}, _SCRIPTS, plotly_js)
