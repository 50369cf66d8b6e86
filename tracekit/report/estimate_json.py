"""The JSON of ``tracekit estimate``: an estimate, a module alone, or a search for meshes; docs/estimate.md names the keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tracekit import __version__
from tracekit.collectives.cost import logical_steps
from tracekit.estimate.estimate import Estimate, Role
from tracekit.estimate.fit import Candidate, why_best
from tracekit.estimate.hardware import Hardware
from tracekit.estimate.notes import notes
from tracekit.estimate.pipeline import in_flight
from tracekit.estimate.plan import Plan
from tracekit.estimate.time import algorithm_of, row_seconds
from tracekit.estimate.traffic import Traffic
from tracekit.report.document import clean

SCHEMA_VERSION = 1
_US = 1e6
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
            "communication": all_traffic(result),
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
            "notes": notes(result),
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
    after = {name: getattr(plan, name) for name in ("reshard_after_forward", "reshard_after_backward")}
    values["strategy"] |= {**after, "sync_every_micro_batch": plan.syncs_each}
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


def all_traffic(result: Estimate) -> list[dict[str, Any]]:
    """Every class of collectives of every role."""
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
            "tight": c.tight,
            "micro_batches": c.micro_batches,
            "micro_batch": None if c.plan is None else c.plan.batch.micro_batch,
            "recompute": None if c.plan is None else c.plan.batch.recompute,
            "expert_overlap": None if c.plan is None else c.plan.expert_overlap,
            "schedule": None if c.plan is None or c.mesh.pp == 1 else c.plan.schedule,
            "virtual_stages": None if c.plan is None or c.mesh.pp == 1 else c.plan.virtual_stages,
            "compute_us": None if c.step is None else c.step.compute * _US,
            "exposed_comm_us": None if c.step is None else c.step.exposed * _US,
            "bubble_us": None if c.step is None else c.step.bubble * _US,
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
            "why": why_best(candidates) or None,
            "meshes": rows,
        }
    )
    return found
