"""What a step would take if something were otherwise, by replay of the recorded work with other costs (``graph``).

Two questions, told apart by ``definition``. *kind* (ByteDance's study of stragglers, 2025): how much slower is the job than if all work of
one kind took equally long everywhere? It blames a stage that holds more work, as much as a device that is slow. *role*: ... if all work of
one kind took equally long on all ranks of a stage? It blames what a rank does, not how the plan divides the model. Both leave launch delays
out; ``replayed_us`` is the step without them. The scenarios keep them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from tracekit.findings import Finding, Section, Table
from tracekit.graph.local import LocalWork, reduce_window
from tracekit.graph.scenarios import STANDARD, Scenario, scenario
from tracekit.graph.slowdown import Slowdown
from tracekit.graph.study import LARGEST_ERROR, Study, study_of
from tracekit.job.activity import Activity
from tracekit.job.model import Job
from tracekit.schema import Column, table
from tracekit.units import NS_PER_US, NULL, capitalized, format_ns, plural

ORDER = 52

SCENARIOS = table(
    "scenarios",
    Column("name", "str", "", "what is otherwise", "Scenario", "name"),
    Column("step_ns", "int64", "ns", "the mean step of the replay", "Step", "step_us", "the job gives no ground for it"),
    Column("gain_ns", "int64", "ns", "what the step would win", "Gain", "gain_us", "the job gives no ground for it"),
    Column("share", "float64", "share", "gain, of the step", "Gain"),
    Column("reason", "str", "", "why there is no replay", "Why not", "reason", "it was replayed", "-"),
)
#: What the scenarios are called in a table for readers.
_SAID = {
    "perfect_overlap": "all communication beside compute",
    "no_straggler": "no rank slower than its peers",
    "equal_stages": "all stages equally long",
    "no_host": "the host never late",
}


def reduce(activity: Activity) -> LocalWork | None:
    """The window's part of the graph; the analyses that replay all use it."""
    return reduce_window(activity)


@dataclass(frozen=True)
class WhatIf:
    """``study`` None: ``reason``."""

    study: Study | None
    reason: str
    scenarios: Sequence[Scenario]
    asked: Sequence[str] = ()

    def findings(self) -> list[Finding]:
        """What the user asked for; other analyses draw their conclusions themselves."""
        if self.study is None:
            return [Finding("what_if.scenario", "info", f"What if {name}: {self.reason}.") for name in self.asked]
        asked = [one for one in self.scenarios if one.name in self.study.job.what_if]
        return [_asked(self.study, one) for one in asked]

    def sections(self) -> list[Section]:
        """The scenarios, and how much slower the job is than its ideal."""
        if self.study is None:
            return []
        lead = f"Replay of {plural(self.study.graph.steps, 'step')}; it misses the measured step by {self.study.error:.1%}."
        lead += "".join(f" {capitalized(note)}." for note in self.study.graph.notes)
        frame = _frame(self.study, self.scenarios)
        frame = frame.assign(name=[_SAID.get(name, name) for name in frame["name"]])
        return [
            Section("What if", lead, (Table.of("Scenarios, mean step", SCENARIOS, frame), *_slowdown_table(self.study)), name="what-if")
        ]

    def json(self) -> dict[str, Any]:
        """``what_if``: one entry a definition; null with the reason where nothing could be replayed."""
        if self.study is None:
            return {"not_measured": {"what_if": self.reason}}
        scenarios = SCENARIOS.records(_frame(self.study, self.scenarios))
        return {"what_if": [_entry(self.study, found, scenarios) for found in self.study.slowdowns]}


def _entry(study: Study, found: Slowdown, scenarios: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "definition": found.definition,
        "steps": [int(number) for number in study.graph.numbers if number != NULL],
        "measured_us": found.measured_ns / NS_PER_US,
        "replayed_us": found.replayed_ns / NS_PER_US,
        "replay_error": found.error,
        "replay_error_with_delays": study.error,
        "ideal_us": found.ideal_ns / NS_PER_US,
        **_parts(found),
        "stream_waits": "recorded" if study.graph.synced else "inferred",
        "inferred_share": study.graph.guessed_share,
        "notes": list(study.graph.notes),
        "scenarios": scenarios,
    }


def _parts(found: Slowdown) -> dict[str, Any]:
    """What is concluded from the replay; nothing where launch delays, which it leaves out, are much of the step."""
    if found.error > LARGEST_ERROR:
        why = f"the replay without launch delays misses the measured step by {found.error:.0%}: the host, or gaps that nothing explains"
        keys = ("slowdown", "by_step", "by_type", "by_stage", "by_rank", "worst_ranks", "worst_ranks_share", "last_stage_share")
        return {**dict.fromkeys(keys), "reason": f"{why}, are that much of it"}
    return {
        "slowdown": found.slowdown,
        "by_step": found.by_step,
        "by_type": found.by_kind,
        "by_stage": found.by_stage or None,
        "by_rank": found.by_rank,
        "worst_ranks": found.worst_ranks,
        "worst_ranks_share": found.worst_ranks_share,
        "last_stage_share": found.last_stage_share,
        "reason": None,
    }


def _frame(study: Study, scenarios: Sequence[Scenario]) -> pd.DataFrame:
    steps = [NULL if one.step_ns is None else round(one.step_ns) for one in scenarios]
    gains = [NULL if one.step_ns is None else round(study.step_ns - one.step_ns) for one in scenarios]
    return SCENARIOS.frame(
        {
            "name": [one.name for one in scenarios],
            "step_ns": steps,
            "gain_ns": gains,
            "share": [float("nan") if gain == NULL else gain / study.step_ns for gain in gains],
            "reason": [one.reason for one in scenarios],
        }
    )


def _asked(study: Study, one: Scenario) -> Finding:
    if one.step_ns is None:
        return Finding("what_if.scenario", "info", f"What if {one.name}: {one.reason}.", None, "us", "what_if")
    gain = study.step_ns - one.step_ns
    change = f"{format_ns(abs(gain))} {'shorter' if gain >= 0 else 'longer'} ({abs(gain) / study.step_ns:.1%})"
    text = f"What if {one.name}: a step takes {format_ns(one.step_ns)} instead of {format_ns(study.step_ns)}, {change}."
    return Finding("what_if.scenario", "info", text, gain / NS_PER_US, "us", "what_if", "", int(max(gain, 0)), int(gain))


def _slowdown_table(study: Study) -> list[Table]:
    """S and its parts for each definition."""
    rows = []
    for found in (one for one in study.slowdowns if one.error <= LARGEST_ERROR):
        of = "over all stages" if found.definition == "kind" else "of its stage"
        rows.append({"what": f"everything at the mean of its kind {of}", "s": found.slowdown})
        rows += [{"what": f"{name} alone as measured, {of}", "s": value} for name, value in found.by_kind.items()]
    if not rows:
        return []
    headings = {"what": "Ideal", "s": "Times as long as the ideal step"}
    note = "Without launch delays. A kind above 1 makes the step longer than if all work of that kind took equally long."
    return [Table("Slowdown by kind of work", pd.DataFrame(rows), headings, note)]


def analyze(job: Job) -> WhatIf:
    """Replay the job with other costs."""
    study = study_of(job)
    if not isinstance(study, Study):
        return WhatIf(None, study.reason, (), job.what_if)
    if not study.trusted:
        return WhatIf(None, f"the replay misses the measured step by {study.error:.0%}", (), job.what_if)
    return WhatIf(study, "", [scenario(study, name) for name in dict.fromkeys([*STANDARD, *job.what_if])])
