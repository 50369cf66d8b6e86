"""The head of every report, terminal and HTML alike: which job, and where the time of a step goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tracekit.units import NS_PER_US, format_ns

#: Parts of a step: key in ``breakdown``, name for a reader, role (its colour everywhere). Together they are the whole step.
PARTS = (
    ("compute_us", "compute", "compute"),
    ("exposed_comm_us", "exposed communication", "exposed"),
    ("memory_copy_us", "exposed copies", "copy"),
    ("idle_us", "idle", "idle"),
)
#: The finding that says that part of what counts as compute may be communication.
SUSPICION = "breakdown.communication_not_recognised"


ONE_TIME_LINE = "one time line"


@dataclass(frozen=True)
class Part:
    """One part of the mean step. ``share`` is of the step, 0 to 1."""

    name: str
    role: str
    us: float
    share: float


@dataclass(frozen=True)
class Answer:
    """Where the time goes, over all ranks and steps; ``hidden_us`` runs beside compute and is no part of the sum."""

    sentence: str
    step_us: float | None
    parts: Sequence[Part]
    hidden_us: float | None


def answer(document: Mapping[str, Any]) -> Answer:
    """The one-line answer, from ``mean_step``."""
    mean = next(iter(document.get("mean_step") or []), None)
    if mean is None or not mean["step_us"] or not mean["steps"]:
        return Answer("No step could be broken down: see coverage for the reason.", None, (), None)
    step = mean["step_us"]
    parts = [Part(name, role, mean[key], mean[key] / step) for key, name, role in PARTS]
    what = "A step takes" if any(row["step"] is not None for row in document["breakdown"]) else "The recorded window takes"
    named = sorted((part for part in parts if part.share >= 0.005), key=lambda part: -part.share)
    shares = ", ".join(f"{percent(part.share)} {part.name}" for part in named)
    average = " on average" if mean["steps"] > 1 else ""
    suspicion = next((finding["text"] for finding in document.get("findings", []) if finding["id"] == SUSPICION), "")
    shares = f" How it divides is not known: {suspicion}" if suspicion else f": {shares}." if shares else ""
    sentence = f"{what} {format_us(step)}{average}" + (f".{shares}" if suspicion else shares or ".")
    return Answer(sentence, step, tuple(parts), mean["hidden_comm_us"])


@dataclass(frozen=True)
class Fact:
    """A label with its value; ``detail`` explains, ``warns`` asks for attention."""

    label: str
    value: str
    detail: str = ""
    warns: bool = False


def facts(document: Mapping[str, Any]) -> list[Fact]:
    """What kind of job this was."""
    job = document["job"]
    return [_world(job), *_missing(job), _mesh(job["mesh"]), *_hardware(job), _steps(document), _clock(job["clock"])]


def _world(job: Mapping[str, Any]) -> Fact:
    present, world = len(job["ranks"]), job["world_size"]
    if world is None:
        return Fact("Ranks", str(present), f"{numbers(job['ranks'])}; world size not recorded", warns=True)
    detail = "every rank was read" if present == world else f"read: {numbers(job['ranks'])}"
    return Fact("Ranks", f"{present} of {world}", detail, warns=present != world)


def _missing(job: Mapping[str, Any]) -> list[Fact]:
    missing = job["missing_ranks"]
    return [Fact("Missing", numbers(missing), "their waits and work are not in any figure here", warns=True)] if missing else []


def _mesh(mesh: Mapping[str, Any]) -> Fact:
    source = {
        "manifest": "from the manifest",
        "descriptions": "from the groups' descriptions",
        "rank_lists": "from the groups' rank lists",
        "user": "as given by --mesh",
    }.get(mesh["source"], "nothing in the traces names its axes; --mesh does")
    return Fact("Mesh", mesh_text(mesh) or "not known", source)


def mesh_text(mesh: Mapping[str, Any]) -> str:
    """``pp 2 × tp 4``; '' without axes."""
    return " × ".join(f"{axis['name']} {axis['size']}" for axis in mesh["axes"])


def _hardware(job: Mapping[str, Any]) -> list[Fact]:
    known = [("Device", job["device"]), ("Backend", job["backend"])]
    return [Fact(label, value) for label, value in known if value]


def _steps(document: Mapping[str, Any]) -> Fact:
    job = document["job"]
    if not job["steps"] and any(row["step"] is not None for row in document["breakdown"] or []):
        return Fact("Steps", "none common", "no step was recorded whole by every rank read")
    if not job["steps"]:
        return Fact("Steps", "none marked", "the whole recorded window counts as one")
    return Fact("Steps", numbers(job["steps"]), f"{len(job['steps'])} recorded whole by every rank read")


def _clock(clock: Mapping[str, Any]) -> Fact:
    residual = clock["residual_us"]
    if not clock["aligned"]:
        return Fact("Clocks", "not aligned", clock["note"] or "times of different hosts cannot be compared", warns=True)
    moved = max((abs(offset) for offset in clock["offset_us"].values() if offset is not None), default=0.0)
    value = f"corrected by up to {format_us(moved)}" if moved else ONE_TIME_LINE
    left = "" if residual is None else f"what remains: {format_us(residual)}" if residual else "nothing contradicts it"
    return Fact("Clocks", value, "; ".join(text for text in (left, clock["note"]) if text))


def numbers(values: Sequence[int], limit: int = 8) -> str:
    """Integers as ranges: ``0–7, 12``; at most ``limit`` ranges."""
    ranges: list[list[int]] = []
    for value in sorted(values):
        if ranges and value == ranges[-1][1] + 1:
            ranges[-1][1] = value
        else:
            ranges.append([value, value])
    shown = [str(low) if low == high else f"{low}–{high}" for low, high in ranges[:limit]]
    if len(ranges) > limit:
        shown.append(f"… {ranges[-1][1]}")
    return ", ".join(shown)


def format_us(us: float | None) -> str:
    """Microseconds for a reader (``1.25 ms``, ``0``); ``–`` where not known."""
    if us is None:
        return "–"
    return format_ns(us * NS_PER_US) if us else "0"


def percent(share: float) -> str:
    """``61%``; ``<1%`` for a little."""
    return f"{share:.0%}" if share >= 0.01 or share <= 0 else "<1%"
