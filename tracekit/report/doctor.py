"""What a recording can answer, question by question, and how to record what it cannot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

State = Literal["yes", "partly", "no"]
#: A matched share below this, an unattributed share above: part of the answer is missing.
_ENOUGH, _LITTLE = 0.95, 0.2
_RECORDER = "record with tracekit (tracekit run, or tracekit.record in the loop)"


@dataclass(frozen=True)
class Answer:
    """``state`` of one question, ``why`` it is no full yes, and ``how`` to record it; both empty for a yes."""

    question: str
    state: State
    why: str = ""
    how: str = ""


Verdict = tuple[State, str, str]
_YES: Verdict = ("yes", "", "")


def answers(document: Mapping[str, Any]) -> list[Answer]:
    """Every question, in the order in which a reader asks them."""
    return [Answer(question, *verdict(document)) for question, verdict in _QUESTIONS]


def _whole(document: Mapping[str, Any]) -> Verdict:
    job, bad = document["job"], [entry for entry in document["coverage"] if entry["status"] in ("truncated", "skipped")]
    if job["missing_ranks"]:
        return "no", f"{len(job['missing_ranks'])} of {job['world_size']} ranks are missing", "put the traces of all ranks into one folder"
    if bad:
        return "partly", f"{len(bad)} files are truncated or not usable", "let the profiler finish writing before the job ends"
    if job["world_size"] is None:
        return (
            "partly",
            "the traces do not say how many ranks there were",
            "export the traces while the process group is there",
        )
    return _YES


def _steps(document: Mapping[str, Any]) -> Verdict:
    if not any(row["compute_us"] is not None for row in document["breakdown"] or []):
        return "no", "no work of a step was recorded", "profile CPU and device activities over some whole steps"
    if all(row["step"] is None for row in document["breakdown"]):
        return "partly", "no step is marked: the whole window counts as one", "call profiler.step() in the loop"
    if len(document["job"]["steps"]) < 3:
        return "partly", "fewer than three steps were recorded whole by every rank", "record three steps or more after warm-up"
    return _YES


def _waits(document: Mapping[str, Any]) -> Verdict:
    rows = document["collectives"] or []
    if not rows:
        return "no", "no communication was recorded", "profile a step that communicates, with device activities"
    total, matched = (sum(row[key] for row in rows) for key in ("rank_operations", "matched_operations"))
    how = "record all ranks over the same steps, with a torch that writes the key Seq into the traces"
    if not matched:
        return "no", "no collective could be matched with another rank's", how
    if not document["job"]["clock"]["aligned"]:
        return "partly", "the clocks of the hosts could not be aligned", "synchronize the hosts' clocks, or record collectives of all hosts"
    return ("partly", f"{matched / total:.0%} of the operations are matched", how) if matched < _ENOUGH * total else _YES


def _axes(document: Mapping[str, Any]) -> Verdict:
    if document["job"]["mesh"]["axes"]:
        unknown = sum(group["axis"] is None and group["operations"] > 0 for group in document["process_groups"] or [])
        if not unknown:
            return _YES
        return "partly", f"{unknown} groups that communicate are on no known axis", "give the mesh with --mesh, or name its dimensions"
    how = "build groups with DeviceMesh and names, give --mesh pp=2,dp=4, or " + _RECORDER
    return "no", "nothing in the traces names the axes of the mesh", how


def _links(document: Mapping[str, Any]) -> Verdict:
    rows = document["collectives"] or []
    known = sum(row["busbw_gb_s"] is not None for row in rows)
    if rows and known == len(rows):
        return _YES
    how = "all ranks of a group, with record_shapes=True"
    return ("partly" if known else "no"), f"{known} of {len(rows)} kinds of call have a bandwidth", how


def _memory(document: Mapping[str, Any]) -> Verdict:
    rows = [row for row in document["memory"] or [] if row["peak_bytes"]]
    if not rows:
        return (
            "no",
            document["not_measured"].get("memory", "no memory was recorded"),
            "profile_memory=True, or a memory snapshot with stacks",
        )
    worst = max((row["categories"] or {}).get("unattributed", 0) / row["peak_bytes"] for row in rows)
    older = max((row["categories"] or {}).get("before_recording", 0) / row["peak_bytes"] for row in rows)
    if worst > _LITTLE:
        return "partly", f"{worst:.0%} of a peak has no known owner", _RECORDER + ", or keep stacks in the snapshot"
    if older > _LITTLE:
        return "partly", f"{older:.0%} of a peak is older than the recording", "begin recording before the model is built, or " + _RECORDER
    return _YES


def _host(document: Mapping[str, Any]) -> Verdict:
    rows = document.get("idle") or []
    if not rows:
        return "no", "no idle time was measured", "profile CPU and device activities together"
    if document["job"]["device"] and not any(row["launches"] for row in rows):
        return "no", "no launch is in the traces", "profile ProfilerActivity.CPU beside the device"
    return _YES


def _model(document: Mapping[str, Any]) -> Verdict:
    if document["comparison"]:
        return _YES
    return "no", document["not_measured"].get("comparison", "nothing tells what was run"), _RECORDER


_QUESTIONS: tuple[tuple[str, Callable[[Mapping[str, Any]], Verdict]], ...] = (
    ("Is it the whole job?", _whole),
    ("Where does the time of a step go?", _steps),
    ("Which rank do the others wait for?", _waits),
    ("Which mesh axis costs what?", _axes),
    ("How fast are the links?", _links),
    ("Does the host keep the device busy?", _host),
    ("Who owns the peak of memory?", _memory),
    ("Is it what the model predicts?", _model),
)
