"""The estimate for readers: its JSON document, its charts, and one HTML file that opens from disk."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup

from tracekit import __version__
from tracekit.collectives.cost import logical_steps
from tracekit.estimate.communication import Traffic
from tracekit.estimate.estimate import Estimate, Role
from tracekit.estimate.fit import Candidate
from tracekit.estimate.hardware import Hardware
from tracekit.estimate.memory import CATEGORIES
from tracekit.estimate.pipeline import in_flight
from tracekit.estimate.plan import Plan
from tracekit.estimate.time import algorithm_of, row_seconds
from tracekit.findings import StackedBars, Table
from tracekit.report import figures, palette
from tracekit.report.document import clean, encode, write_atomically
from tracekit.report.html import named, plotly_source
from tracekit.report.quantity import axis_unit, quantity
from tracekit.report.tables import table_data
from tracekit.report.text import script_json
from tracekit.units import format_bytes

SCHEMA_VERSION = 1
_US = 1e6
_TEMPLATES = Path(__file__).parent / "templates"
_SCRIPTS = ("page.js", "tables.js", "charts.js")
_PLOTLY_MARK = b"<!--plotly-->"
_MESH = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp")


def document(result: Estimate) -> dict[str, Any]:
    """Everything the estimate says, as plain finite values; docs/estimate.md names the keys."""
    found: dict[str, Any] = clean(
        {
            "schema_version": SCHEMA_VERSION,
            "tracekit_version": __version__,
            "model": {**asdict(result.shape), "parameters": result.parameters},
            "mesh": _mesh(result.plan),
            "plan": _plan(result.plan),
            "hardware": {
                "name": result.hardware.name,
                "memory_bytes": result.hardware.memory_bytes,
                "peak_tflops": result.hardware.peak_flops(result.plan.recipe.compute) / 1e12,
                "inside": asdict(result.hardware.inside),
                "outside": asdict(result.hardware.outside),
                "per_node": result.hardware.per_node,
            },
            "assumptions": asdict(result.assumptions),
            "memory": [_memory(role, result.hardware.memory_bytes) for role in result.roles],
            "communication": _all_traffic(result),
            "pipeline": _pipeline(result),
            "flops": {
                "model_flops": result.model_flops,
                "hardware_flops": result.hardware_flops,
                "tokens": result.tokens,
                "mfu": result.mfu,
                "hfu": result.hfu,
            },
            "step": {
                "step_us": result.step.total * _US,
                "compute_us": result.step.compute * _US,
                "exposed_comm_us": result.step.exposed * _US,
                "comm_us": result.step.communication * _US,
                "bubble_us": result.step.bubble * _US,
                "optimizer_us": result.step.optimizer * _US,
            },
            "fits": result.fits,
            "notes": list(result.notes),
        }
    )
    return found


def role_document(role: Role, plan: Plan, device: Hardware) -> dict[str, Any]:
    """What is known of a module alone: model state and data-parallel collectives; no activations, FLOP and step."""
    return {
        "schema_version": SCHEMA_VERSION,
        "tracekit_version": __version__,
        "mesh": _mesh(plan),
        "plan": clean(_plan(plan)),
        "memory": [clean(_memory(role, device.memory_bytes))],
        "communication": [clean(_traffic(row, role, device, "preset")) for row in role.traffic],
        "notes": ["activations and FLOP are not known of a module alone"],
    }


def _mesh(plan: Plan) -> dict[str, Any]:
    axes = [{"name": name, "size": getattr(plan.mesh, name)} for name in _MESH]
    return {"axes": [axis for axis in axes if axis["size"] > 1], "world_size": plan.mesh.world}


def _plan(plan: Plan) -> dict[str, Any]:
    values = asdict(plan)
    values.pop("mesh")
    return {**values, "global_batch": plan.global_batch}


def _memory(role: Role, device_bytes: int) -> dict[str, Any]:
    peak = role.memory.peak
    phases = {phase: moment for phase in ("forward", "backward", "optimizer") if (moment := role.memory.largest(phase)) is not None}
    return {
        "role": role.name,
        "stages": list(role.stages),
        "parameters": role.elements,
        "peak_bytes": peak.total,
        "peak_phase": peak.phase,
        "peak_unit": peak.unit or None,
        "reserved_bytes": role.memory.reserved,
        "fits": role.memory.reserved <= device_bytes,
        "categories": dict(peak.bytes),
        "phases": {phase: {"peak_bytes": moment.total, "categories": dict(moment.bytes)} for phase, moment in phases.items()},
    }


def _traffic(row: Traffic, role: Role, device: Hardware, latency: str) -> dict[str, Any]:
    algorithm = algorithm_of(row.kind)
    return {
        "role": role.name,
        "stages": list(role.stages),
        "axis": row.axis,
        "purpose": row.purpose,
        "kind": row.kind,
        "phase": row.phase,
        "size": row.size,
        "count": row.calls,
        "full_bytes": row.full_bytes,
        "sent_bytes": row.sent_bytes,
        "algorithm": algorithm,
        "logical_steps": 0 if row.kind == "recv" else row.calls * logical_steps(row.kind, algorithm, row.size),
        "duration_us": row_seconds(row, device, latency) * _US,
    }


def _all_traffic(result: Estimate) -> list[dict[str, Any]]:
    latency = result.assumptions.latency
    return [_traffic(row, role, result.hardware, latency) for role in result.roles for row in role.traffic]


def _pipeline(result: Estimate) -> dict[str, Any] | None:
    plan, shares = result.plan, result.bubble_shares
    if shares is None:
        return None
    counts = in_flight(plan.schedule, plan.mesh.pp, plan.batch.micro_batches, plan.virtual_stages)
    return {
        "schedule": plan.schedule,
        "stages": plan.mesh.pp,
        "microbatches": plan.batch.micro_batches,
        "virtual_stages": plan.virtual_stages,
        "bubble_ratio": shares[0],
        "bubble_share": shares[1],
        "in_flight_peak": dict(enumerate(counts)),
    }


def fit_document(candidates: Sequence[Candidate], world: int, memory_bytes: int) -> dict[str, Any]:
    """The result of a search: every mesh, those that fit first."""
    rows = [
        {
            "mesh": {name: getattr(c.mesh, name) for name in _MESH},
            "fits": c.fits,
            "reason": c.reason or None,
            "micro_batches": c.micro_batches,
            "step_us": None if c.seconds is None else c.seconds * _US,
            "mfu": c.mfu,
            "peak_bytes": c.peak,
        }
        for c in candidates
    ]
    found: dict[str, Any] = clean(
        {
            "schema_version": SCHEMA_VERSION,
            "tracekit_version": __version__,
            "world_size": world,
            "memory_bytes": memory_bytes,
            "meshes": rows,
        }
    )
    return found


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
    entries = _all_traffic(result)
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
            "fits": ["yes" if c.fits else "no" for c in candidates],
            "step_s": [float("nan") if c.seconds is None else c.seconds for c in candidates],
            "mfu": [float("nan") if c.mfu is None else c.mfu for c in candidates],
            "peak": [float("nan") if c.peak is None else float(c.peak) for c in candidates],
            "reason": [c.reason or "–" for c in candidates],
        }
    )
    columns = {"mesh": "mesh", "fits": "fits", "step_s": "step [s]", "mfu": "MFU [share]", "peak": "peak [bytes]", "reason": "why not"}
    return Table("Meshes", frame, columns, missing=dict.fromkeys(("step_s", "mfu", "peak"), "the mesh cannot run"))


def render(result: Estimate, plotly_js: str = "inline") -> str:
    """The page of an estimate."""
    return b"".join(_parts(_content(result), plotly_js)).decode()


def write(path: str | os.PathLike[str], result: Estimate, plotly_js: str = "inline") -> None:
    """Write the page of an estimate; an existing file is replaced only when the new one is whole. Raises OSError."""
    write_atomically(path, _parts(_content(result), plotly_js))


def write_fit(path: str | os.PathLike[str], candidates: Sequence[Candidate], title: str, sentence: str) -> None:
    """Write the page of a search."""
    content = {"title": title, "sentence": sentence, "facts": [], "blocks": [_table(fit_table(candidates), "t-fit")], "notes": []}
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
    facts = [
        ("Model", f"{result.shape.name}, {result.parameters / 1e9:.4g} billion parameters"),
        ("Mesh", f"{plan.mesh.text()} ({plan.mesh.world} ranks)"),
        ("Strategy", f"{plan.strategy.name}, {plan.recipe.name}"),
        ("Batch", f"{plan.global_batch} sequences of {result.shape.sequence} tokens, {plan.batch.micro_batches} micro-batches a rank"),
        ("Hardware", f"{result.hardware.name}, {result.hardware.inside.name}, {result.hardware.outside.name}"),
    ]
    blocks = [
        _memory_block(result),
        _plot(communication_chart(result), "c-traffic"),
        _plot(time_chart(result), "c-time"),
        _table(traffic_table(result), "t-traffic"),
    ]
    return {"title": result.shape.name, "sentence": sentence(result), "facts": facts, "blocks": blocks, "notes": list(result.notes)}


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
    return {
        "kind": "figure",
        "id": key,
        "title": chart.title,
        "note": chart.note,
        "height": drawn["layout"]["height"] if drawn else 0,
        "data": _json(drawn) if drawn else None,
    }


def _table(table: Table, key: str) -> dict[str, Any]:
    data = table_data(table)
    return {"kind": "table", "id": key, "title": table.title, "note": table.note, "table": data, "data": _json(data.payload())}


def _json(value: Any) -> Markup:
    return Markup(script_json(encode(value)).decode())


def _parts(content: Mapping[str, Any], plotly_js: str) -> Iterable[bytes]:
    page = _template().render(
        **content,
        version=__version__,
        plotly_js=None if plotly_js == "inline" else plotly_js,
        css=_asset("style.css"),
        palette=Markup(palette.css()),
        scripts=[_asset(name) for name in _SCRIPTS],
    )
    before, _, after = page.encode("utf-8", "replace").partition(_PLOTLY_MARK)
    if plotly_js == "inline":
        return [before, b"<script>", plotly_source(), b"</script>", after]
    return [before, after]


def _asset(name: str) -> Markup:
    return Markup((_TEMPLATES / name).read_text(encoding="utf-8"))


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["named"] = named
    return environment.get_template("estimate.html")
