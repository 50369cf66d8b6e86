"""The head of every report, terminal and HTML alike: which job, and where the time of a step goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import fmean, median
from typing import Any

from tracekit.estimate.hardware import hardware_of
from tracekit.trace.steps import FAR_OFF
from tracekit.units import NS_PER_S, NS_PER_US, format_bytes, format_ns

#: Parts of a step: key in ``breakdown``, name for a reader, role (its colour everywhere). Together they are the whole step.
PARTS = (
    ("compute_us", "compute", "compute"),
    ("exposed_comm_us", "exposed communication", "exposed"),
    ("memory_copy_us", "exposed copies", "copy"),
    ("idle_us", "idle", "idle"),
)
#: The finding that says that part of what counts as compute may be communication.
#: The findings that say why no step is known whole.
UNKNOWN = ("breakdown.device_not_recorded", "breakdown.lost")
SUSPICION = "breakdown.communication_not_recognised"


#: 2015 and 2100: times outside are no times of day.
_FIRST_DAY, _LAST_DAY = 1_420_070_400 * NS_PER_S, 4_102_444_800 * NS_PER_S
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


#: The first finding that says more than any mean step.
_STANDS_STILL = {"hang.root": "The job stands still", "hang.behind": "The job may stand still"}


def answer(document: Mapping[str, Any]) -> Answer:
    """The one-line answer, from ``mean_step``."""
    for finding in document.get("findings", [])[:1]:
        if finding["id"] in _STANDS_STILL:
            return Answer(f"{_STANDS_STILL[finding['id']]}: {finding['text']}", None, (), None)
    mean, far = _typical(document, next(iter(document.get("mean_step") or []), None))
    if mean is None or not mean["step_us"] or not mean["steps"]:
        return Answer(_peak_alone(document) or f"No step could be broken down. {_why_unknown(document)}", None, (), None)
    step = mean["step_us"]
    parts = [Part(name, role, mean[key], mean[key] / step) for key, name, role in PARTS]
    what = "A step takes" if any(row["step"] is not None for row in document["breakdown"]) else "The recorded window takes"
    named = sorted((part for part in parts if part.share >= 0.005), key=lambda part: -part.share)
    shares = ", ".join(f"{percent(part.share)} {part.name}" for part in named)
    average = " on average" if mean["steps"] > 1 else ""
    suspicion = next((finding["text"] for finding in document.get("findings", []) if finding["id"] == SUSPICION), "")
    shares = f" How it divides is not known: {suspicion}" if suspicion else f": {shares}." if shares else ""
    sentence = f"{what} {format_us(step)}{average}" + (f".{shares}" if suspicion else shares or ".")
    sentence += f" Left out: {far}." if far else ""
    return Answer(sentence, step, tuple(parts), mean["hidden_comm_us"])


def _typical(document: Mapping[str, Any], mean: Mapping[str, Any] | None) -> tuple[Mapping[str, Any] | None, str]:
    """(the mean of the usual steps, which steps are far off and left out of it): of three steps or more, those above twice the median."""
    rows = [row for row in document.get("breakdown") or [] if row["step"] is not None and row["step_us"] and row["compute_us"] is not None]
    lengths: dict[int, list[float]] = {}
    for row in rows:
        lengths.setdefault(row["step"], []).append(row["step_us"])
    length = {step: fmean(values) for step, values in lengths.items()}
    if mean is None or len(length) < 3:
        return mean, ""
    far = {step: us for step, us in length.items() if us > FAR_OFF * median(length.values())}
    usual = [row for row in rows if row["step"] not in far]
    if not far or not usual:
        return mean, ""
    keys = [key for key, value in mean.items() if key.endswith("_us")]
    means = {key: fmean(row[key] for row in usual if row.get(key) is not None) if any(row.get(key) is not None for row in usual) else None
             for key in keys}  # fmt: skip
    shown = [f"step {step} ({format_us(us)})" for step, us in sorted(far.items())[:3]]
    more = f" and {len(far) - 3} more" if len(far) > 3 else ""
    return {**mean, **means, "steps": mean["steps"] - len(far) if mean["steps"] > len(far) else mean["steps"]}, ", ".join(shown) + more


def _peak_alone(document: Mapping[str, Any]) -> str:
    """The answer where there is memory and no step; empty where there is neither."""
    row = highest_peak(document)
    if row is None:
        return _end_alone(document)
    owner = _owner(row).removesuffix("; ")
    return f"Memory peaks at {_peak(row)} on {_device(row)}" + (f", {owner}." if owner else ".")


def _end_alone(document: Mapping[str, Any]) -> str:
    """The same where only the end of it is known."""
    row = max((row for row in document.get("memory") or [] if row["end_bytes"]), key=lambda row: row["end_bytes"], default=None)
    if row is None:
        return ""
    of = f" of {format_bytes(row['reserved_end_bytes'])} reserved" if row["reserved_end_bytes"] else ""
    return f"At the end {format_bytes(row['end_bytes'])}{of} are allocated on {_device(row)}; the peak is not known."


def _owner(row: Mapping[str, Any]) -> str:
    """``42% of it activations; ``: who owns most of a peak; '' where that is not known."""
    name, most = max((row["categories"] or {"": 0}).items(), key=lambda item: item[1])
    lines = [unit for unit in row.get("units") or [] if unit["category"] == name == "unattributed" and unit["name"]]
    if lines:
        first = max(lines, key=lambda unit: unit["bytes"])
        return f"{percent(first['bytes'] / row['peak_bytes'])} of it allocated at {first['name']}; "
    return f"{percent(most / row['peak_bytes'])} of it {name.replace('_', ' ')}; " if most else ""


def _peak(row: Mapping[str, Any]) -> str:
    """The peak of a row of ``memory``, which may be a lower bound."""
    return ("at least " if row.get("lower_bound") else "") + format_bytes(row["peak_bytes"])


def highest_peak(document: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The row of ``memory`` with the highest peak."""
    return max((row for row in document.get("memory") or [] if row["peak_bytes"]), key=lambda row: row["peak_bytes"], default=None)


def _device(row: Mapping[str, Any]) -> str:
    return f"rank {row['rank']} ({row['device']})" if row["device"] else f"rank {row['rank']}"


@dataclass(frozen=True)
class FirstStep:
    """The one thing to do first. ``gain_us``: what a step would win, None where nothing can be said; ``index`` of the finding."""

    text: str
    advice: str
    gain_us: float | None
    index: int


def gain_of(finding: Mapping[str, Any]) -> float | None:
    """What a step would win without this finding [us]; None where no time can be named."""
    return finding.get("gain_us") or None


def first_step(document: Mapping[str, Any]) -> FirstStep | None:
    """The first finding that comes with advice, and is no mere remark; None where there is none."""
    for index, finding in enumerate(document["findings"]):
        if finding["advice"] and (finding["severity"] != "info" or gain_of(finding)):
            return FirstStep(finding["text"], finding["advice"], gain_of(finding), index)
    return None


def _why_unknown(document: Mapping[str, Any]) -> str:
    return next((found["text"] for found in document.get("findings", []) if found["id"] in UNKNOWN), "See coverage for the reason.")


@dataclass(frozen=True)
class Fact:
    """A label with its value; ``detail`` explains, ``warns`` asks for attention; ``place`` is the chapter that has more."""

    label: str
    value: str
    detail: str = ""
    warns: bool = False
    place: str = ""


def facts(document: Mapping[str, Any]) -> list[Fact]:
    """What kind of job this was."""
    job = document["job"]
    hardware = [*_nodes(job), *_hardware(job), *_memory(document)]
    return [
        _world(job),
        *_missing(job),
        _mesh(job["mesh"]),
        *hardware,
        _steps(document),
        _clock(job["clock"]),
        _data(document),
        *_when(job),
    ]


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
    return Fact("Mesh", mesh_text(mesh) or "not known", source, place="groups")


def mesh_text(mesh: Mapping[str, Any]) -> str:
    """``pp 2 × tp 4``; '' without axes."""
    return " × ".join(f"{axis['name']} {axis['size']}" for axis in mesh["axes"])


def _hardware(job: Mapping[str, Any]) -> list[Fact]:
    known = [("Device", job["device"]), ("Backend", job["backend"])]
    return [Fact(label, value) for label, value in known if value]


def _nodes(job: Mapping[str, Any]) -> list[Fact]:
    count = job.get("nodes")
    return [Fact("Nodes", str(count), f"{len(job['ranks']) / count:.3g} ranks on each that were read")] if count else []


def _memory(document: Mapping[str, Any]) -> list[Fact]:
    """The highest peak, and what the device has left beside it where its size is known by its name."""
    row = highest_peak(document)
    if row is None:
        return []
    device = hardware_of(document["job"]["device"] or "")
    reserved = max((r["reserved_peak_bytes"] or r["peak_bytes"] for r in document["memory"] if r["peak_bytes"]), default=0)
    detail = f"{_device(row)}; {_owner(row)}"
    if device is None:
        return [Fact("Memory peak", _peak(row), detail + "how much the device has is not known", place="memory")]
    left = device.memory_bytes - reserved
    detail += f"{format_bytes(max(left, 0))} of {format_bytes(device.memory_bytes)} were never reserved"
    return [Fact("Memory peak", _peak(row), detail, left < 0.05 * device.memory_bytes, "memory")]


def _data(document: Mapping[str, Any]) -> Fact:
    """How much of what should be there was read."""
    entries = document["coverage"]
    partly = [entry for entry in entries if entry["status"] != "complete"]
    files = f"{len(entries)} file" + ("" if len(entries) == 1 else "s")
    if partly:
        return Fact("Data", f"{len(partly)} of {files} not whole", "see Coverage for what that means", warns=True, place="coverage")
    return Fact("Data", f"{files}, read whole", "" if not document["job"]["missing_ranks"] else "ranks are missing")


def _when(job: Mapping[str, Any]) -> list[Fact]:
    """When the recording began; nothing where its clock is none."""
    ns = job.get("time_zero_unix_ns")
    if ns is None or not _FIRST_DAY <= ns < _LAST_DAY:
        return []
    return [Fact("Recorded", f"{datetime.fromtimestamp(ns // NS_PER_S, UTC):%Y-%m-%d %H:%M} UTC", "start of the first window")]


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
