"""A job that hangs: who waits where, for whom, and what the one does that all wait for.

Taken from flight recorder dumps, Python stacks and NCCL's log beside the traces or alone, or from the traces themselves where they show
that the job stood still (``job.standstill``). ``gather`` lays them side by side,
``waits`` finds the collectives and messages that stand still, ``roots`` follows the chain to its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tracekit.analyses.hang import charts
from tracekit.analyses.hang.gather import Evidence, gather
from tracekit.analyses.hang.nccl import behind, communicators, logs_json
from tracekit.analyses.hang.roots import Edge, Root, edges_of, find_root
from tracekit.analyses.hang.waits import Skipped, Wait, collective_wait, message_waits, skipped
from tracekit.analyses.hang.words import sentence, wait_text
from tracekit.findings import Chart, Finding, Section, Severity
from tracekit.job.model import Job
from tracekit.job.standstill import Standstill
from tracekit.readers.hang_files import Dump, HangFile
from tracekit.units import format_ns, plural

ORDER = 1


@dataclass(frozen=True)
class Hang:
    """``evidence`` is None without any file that tells of a hang. ``root`` is None where nothing stands still."""

    evidence: Evidence | None
    waits: list[Wait]
    skipped: list[Skipped]
    edges: list[Edge]
    root: Root | None
    standstill: Standstill | None = None
    earlier: bool = False  # all figures are of the time before the hang

    @property
    def text(self) -> str:
        """The hang in a sentence. AssertionError without a root."""
        assert self.root is not None
        return sentence(self.evidence, self.root)

    def findings(self) -> list[Finding]:
        """The hang, before anything else; that nothing hangs, where dumps were read."""
        if self.evidence is None:
            return []
        if self.root is None and (by_log := behind(self.evidence)):
            warnings = [text for log in self.evidence.logs for text in log.warnings]
            evidence = "; ".join(warnings[:4]) or "NCCL's logs"
            if by_log[0].ras and not by_log[0].gone:
                return [Finding("hang.behind", "warning", by_log[0].text, evidence=evidence, advice=_ADVICE["ras"])]
            advice = _ADVICE["died" if by_log[0].gone else "busy"]
            return [Finding("hang.root", "critical", by_log[0].text, evidence=evidence, advice=advice)]
        if self.root is None:
            if not self.evidence.dumps:
                return []
            count = plural(len(self.evidence.dumps), "flight recorder dump")
            text = f"Nothing hangs in {count}: " + (
                "what is not complete was in flight, no rank is missing."
                if self.waits
                else "every collective that a rank has called is complete."
            )
            return [Finding("hang.none", "info", text, evidence="the dumps of all ranks")]
        told = [wait_text(wait) for wait in self.waits[:4]] or ["Python stacks"]
        told += [f"and {len(self.waits) - 4} more"] if len(self.waits) > 4 else []
        absorbs: tuple[str, ...] = ()
        if (still := self.standstill) is not None:
            told.append(f"until the traces end, {format_ns(still.waited_ns)} later" + (f", in step {still.step}" if still.step else ""))
            absorbs = () if self.earlier else _OF_TIMES
        severity: Severity = "warning" if self.root.why == "stuck" and still is None else "critical"
        return [Finding("hang.root", severity, self.text, evidence="; ".join(told), advice=_ADVICE[self.root.why], absorbs=absorbs)]

    def sections(self) -> list[Section]:
        """Where every rank stands in every group, the wait chain, and the stacks."""
        if self.evidence is None:
            return []
        of_nccl = communicators(self.evidence)
        if self.root is None:
            lead = "Which communicators NCCL made, and how many calls their ranks have launched. " + "".join(
                b.text for b in behind(self.evidence)[:1]
            )
            return [Section("NCCL's communicators", lead.strip(), [of_nccl], name="nccl")] if of_nccl else []
        lead = "What every rank has called last in each of its process groups, and who waits for whom. " + self.text
        shown: list[Chart] = [charts.graph(self), charts.matrix(self), charts.waits_table(self)]
        if stacks := charts.stacks_table(self):
            shown.append(stacks)
        if of_nccl:
            shown.append(of_nccl)
        return [Section("The job hangs", lead, shown, name="hang")]

    def json(self) -> dict[str, Any]:
        """``hang`` and ``nccl``."""
        if self.evidence is None:
            why = "nothing stands still in the traces, and no flight recorder dump, Python stack or NCCL log lies beside them"
            return {"hang": None, "nccl": None, "not_measured": {"hang": why, "nccl": "no log of NCCL lies beside the traces"}}
        logs = logs_json(self.evidence)
        missing = {} if logs else {"nccl": "no log of NCCL lies beside the traces"}
        if self.root is None:
            by_log = behind(self.evidence)
            if not by_log:
                return {"hang": None, "nccl": logs, "not_measured": {"hang": "nothing stands still in the dumps and logs", **missing}}
            root = {"ranks": by_log[0].ranks, "why": "died" if by_log[0].gone else "busy", "doing": by_log[0].text, "stack": []}
            return {"hang": {"text": by_log[0].text, "source": "nccl", "waiting": [], "root": root, "chain": []}, "nccl": logs}
        return {
            "hang": {
                "text": self.text,
                "source": "traces" if self.standstill is not None else "dumps",
                "waiting": [_waiting(wait) for wait in self.waits],
                "root": {
                    "ranks": self.root.ranks,
                    "why": self.root.why,
                    "doing": self.root.doing,
                    "stack": [str(frame) for frame in self.root.stack[: charts.MOST_FRAMES]],
                },
                "chain": [_edge(edge) for edge in self.edges[: charts.MOST_EDGES]],
                "ranks_with_dump": sorted(self.evidence.dumps) if self.standstill is None else [],
                "nccl": logs,
                "notes": self.evidence.notes,
            },
            "nccl": logs,
            "not_measured": missing,
        }


_ADVICE = {
    "raised": "Look at this exception first; what the other ranks say follows from it.",
    "mismatch": "All ranks of a group have to call the same collective with tensors that fit: look for what depends on the rank here.",
    "skipped": "Look for a branch around this call that one rank does not take: every rank of the group has to make it.",
    "order": "Enter the groups in one order on all ranks.",
    "died": "Look at the log of that rank and of its host: out-of-memory killer, hardware error, preemption.",
    "stuck": "If it stays so: the network, or one device. If the job went on, the dumps were taken in the middle of this call.",
    "ras": "Ask ncclras once more: if the numbers stay, the job hangs here; if they go on, it was caught on its way.",
    "busy": "Look at what this rank does there; if it is right, raise the timeout or let the others do it as well.",
}


#: Findings about times, which say nothing where the time is that of the hang.
_OF_TIMES = (
    "breakdown.compute_imbalance", "breakdown.copies", "breakdown.outside_steps", "breakdown.step_variation", "collectives.costliest",
    "collectives.slow_group", "comparison.link", "idle.host_bound", "idle.queued", "idle.waiting", "kernels.uneven", "links.slow_group",
    "overlap.exposed", "overlap.exposed_axis", "overlap.hidden", "overlap.no_prefetch", "overlap.ring", "pipeline.above_ideal",
    "pipeline.bubble", "pipeline.slow_stage", "pipeline.unequal_stages", "process_groups.placement", "stragglers.moving",
    "stragglers.none", "stragglers.not_replayed", "stragglers.rank", "stragglers.wait_share", "what_if.scenario",
)  # fmt: skip


def _waiting(wait: Wait) -> dict[str, Any]:
    call = wait.waiting[0] if wait.waiting else wait.call
    return {
        "group": wait.group.name,
        "description": wait.group.description or None,
        "axis": wait.group.axis or None,
        "members": list(wait.group.ranks),
        "kind": call.kind,
        "seq": call.seq if call.seq >= 0 else None,
        "sizes": call.what or None,
        "state": call.state_name,
        "site": call.site or None,
        "ranks": sorted(one.rank for one in wait.waiting),
        "missing": wait.missing,
        "no_dump": wait.no_dump,
        "differ": [{"rank": one.rank, "kind": one.kind, "sizes": one.what, "site": one.site or None} for one in wait.differ],
        "last_completed": wait.last_completed if wait.last_completed >= 0 else None,
        "since_unix_ns": call.created_ns or None,
    }


def _edge(edge: Edge) -> dict[str, Any]:
    call = next(call for call in edge.wait.waiting if call.rank == edge.rank)
    return {"rank": edge.rank, "waits_for": edge.waits_for, "group": edge.wait.group.name, "kind": call.kind, "seq": call.seq}


def analyze(job: Job) -> Hang:
    """Find who the job waits for."""
    still = job.standstill if not any(isinstance(file, Dump) for file in job.hang_files) else None
    files: list[HangFile] = [*(still.stacks if still is not None else []), *job.hang_files, *(still.dumps if still is not None else [])]
    if not files:
        return Hang(None, [], [], [], None)
    evidence = gather(files, _axes(job))
    waits = [wait for group in evidence.groups if (wait := collective_wait(evidence, group)) is not None]
    waits += [wait for group in evidence.groups for wait in message_waits(evidence, group)]
    left_out = [skip for wait in waits for skip in skipped(evidence, wait)]
    waits.sort(key=lambda wait: -len(wait.waiting))
    earlier = any(entry.code == "steps_before_hang" for entry in job.notes)
    return Hang(evidence, waits, left_out, edges_of(waits), find_root(evidence, waits, left_out), still, earlier)


def _axes(job: Job) -> Mapping[tuple[int, ...], str]:
    """Mesh axis by members, from the traces."""
    return {tuple(sorted(group.ranks)): group.axis for group in job.groups.groups if group.ranks is not None and group.axis}


__all__ = ["Hang", "analyze"]
