"""Sentences about who makes a step longer: the cause that a replay confirms, what it costs, and who inherits its lateness."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from tracekit.analyses import _thresholds as thresholds
from tracekit.collectives.purpose import role_of_axis
from tracekit.findings import Finding, Subject
from tracekit.graph.causes import Reason, reason_of
from tracekit.graph.culprits import Culprit
from tracekit.graph.scenarios import scenario
from tracekit.graph.study import Study
from tracekit.units import format_ns, listed, plural, shortened

#: Reasons that are about compute.
_COMPUTES = ("more_kernels", "slower_kernels", "tokens")
#: A rank whose excess in all is less than this share of what it is slower by in places is told with both.
_NEARLY = 0.8
_ADVICE = {
    "more_kernels": "Find what this rank computes more of: uneven layers or parameters, another code path, evaluation on one rank only.",
    "slower_kernels": "Compare this device's clocks, temperature and power{tool} with its peers'; "
    "exchange it if they differ, look for larger inputs if they don't.",
    "tokens": "Balance the router (auxiliary loss, bias), limit the capacity, or place the busiest experts on other ranks.",
    "host": "Move that work off the training loop's thread, or spread it over all ranks: data loading in worker processes with prefetch, "
    "saving and logging in the background.",
    "pause": "Look for what happened once: garbage collection (gc.disable and a collection on all ranks together), a checkpoint, "
    "the allocator, another process on that host.",
    "gap": "The trace does not say what this rank waited for: record its host (CPU activity) and stream waits (enable_cuda_sync_events).",
    "link": "Check that link: cable, network card, placement of the group's ranks, and what else uses it.",
    "stage": "Move layers from this stage to others, or give it less: an even split by measured time, not by number of layers.",
    "moving_host": "Look for jitter of the hosts: garbage collection, data loading, other processes on the same cores, power saving.",
    "moving": "Even out the work of one step: pack or bucket sequences by length, balance tokens over ranks, not samples.",
}
#: The same where operators on a host are the work: nothing there has stream waits, or a network card of its own.
_ADVICE_ON_CPU = {
    "slower_kernels": "Look at what else runs on this rank's cores, at its number of threads and their pinning; else for larger inputs.",
    "gap": "That is Python between operators, waiting for input, or another process on its cores: record stacks (with_stack=True).",
    "link": "Check where the group's ranks are placed, and what else uses the network between them.",
}
_TOOLS = (("nvidia", " (nvidia-smi -q -d CLOCK,PERFORMANCE)"), ("tesla", " (nvidia-smi -q -d CLOCK,PERFORMANCE)"), ("amd", " (rocm-smi)"))


#: Findings of other analyses that only measure how ranks differ; who differs, and what it costs, is said here.
_ABSORBED = (
    "breakdown.compute_imbalance",
    "kernels.uneven",
    "pipeline.unequal_stages",
    "collectives.slow_group",
    "stragglers.wait_share",
    "experts.imbalance",
)


def _ranks(ranks: Sequence[int]) -> str:
    """``0, 2`` or, of neighbours, ``128-135``."""
    first, last = min(ranks, default=0), max(ranks, default=0)
    return f"{first}-{last}" if len(ranks) > 2 and last - first + 1 == len(ranks) else listed(ranks, 12)


def findings_of(study: Study, waits: pd.DataFrame, span: str, steps: int) -> list[Finding]:
    """One finding a cause; where there is none and ranks can be compared, that there is none. ``waits`` are those of so many ``steps``."""
    search = study.search
    if not study.trusted:
        text = f"The replay misses the measured step by {study.error:.0%}: who makes it longer is not concluded from it."
        return [Finding("stragglers.not_replayed", "info", text, study.error, "share", "what_if", "")]
    found = []
    for number, culprit in enumerate(search.culprits):
        found.append(_finding(study, culprit, reason_of(study, culprit), waits, span, steps, first=number == 0))
    return found or _none(study, _waited(waits, steps))


def _finding(study: Study, culprit: Culprit, reason: Reason, waits: pd.DataFrame, span: str, steps: int, first: bool) -> Finding:
    share = culprit.gain_ns / study.search.step_ns
    gain = f"Without it {span} would be {format_ns(culprit.gain_ns)} shorter ({share:.1%})."
    if study.graph.steps == 1:
        gain = f"{gain[:-1]}, in the one step that was recorded: it may be chance."
    missing = study.job.unread
    if missing:
        gain = f"Without it {span} would be at least {format_ns(culprit.gain_ns)} shorter ({share:.1%}); it is a possible cause only: "
        gain += f"{plural(missing, 'rank')} of the job {'were' if missing > 1 else 'was'} not read."
    group = study.job.groups[culprit.group].id if culprit.group is not None else None
    subject = Subject(culprit.ranks if culprit.scope != "moving" else (), culprit.axis or None, culprit.stage, group=group)
    if culprit.scope == "rank" and culprit.stage is None and study.places.stages:
        own = int(study.places.stage[study.places.ranks == culprit.ranks[0]][0])
        subject = Subject(culprit.ranks, stage=own)
    return Finding(
        id={"group": "links.slow_group", "stage": "pipeline.slow_stage", "moving": "stragglers.moving"}.get(
            culprit.scope, "stragglers.rank"
        ),
        severity=thresholds.GAIN.of(share) or "info",
        text=f"{_what(study, culprit, reason, span)} {gain}",
        value=culprit.gain_ns / 1000,
        unit="us",
        evidence=_evidence(study),
        advice=_advice(study, "stage" if culprit.scope == "stage" else reason.kind),
        weight_ns=int(culprit.gain_ns),
        gain_ns=int(culprit.gain_ns),
        subject=subject,
        consequences=(*_evened(study, culprit, reason, span), *(_consequences(study, culprit, waits, span, steps) if first else ())),
        absorbs=_ABSORBED if first else (),
    )


def _evidence(study: Study) -> str:
    """What was replayed, how well, and what was left out of it."""
    over = f"replay of {plural(study.graph.steps, 'step')} over {plural(len(study.places.ranks), 'rank')}"
    left_out = "".join(f"; {note}" for note in study.graph.notes if "left out" in note)
    return f"{over} (it misses the measured step by {study.error:.1%}{left_out})"


def _on_cpu(study: Study) -> bool:
    return bool(study.job.traced) and all(window.on_cpu for window in study.job.traced)


def _advice(study: Study, kind: str) -> str:
    """What to do, in words of the job's own device."""
    if _on_cpu(study) and kind in _ADVICE_ON_CPU:
        return _ADVICE_ON_CPU[kind]
    device = study.job.device.lower()
    return _ADVICE[kind].replace("{tool}", next((tool for word, tool in _TOOLS if word in device), ""))


def _what(study: Study, culprit: Culprit, reason: Reason, span: str) -> str:
    """The cause in a sentence."""
    more, ranks = format_ns(culprit.excess_ns), _ranks(culprit.ranks)
    if culprit.scope == "group":
        siblings = "those of the other groups of the axis"
        return f"Transfers of the {culprit.axis} group of ranks {ranks} take {more} longer {span} than {siblings}."
    if culprit.scope == "moving":
        if reason.kind == "moving_host":
            return f"The host of another rank is late in each step, the latest by {more} more than its peers'."
        lead = f"Another rank is slow in each step: the slowest one needs {more} more than its peers"
        return f"{lead} (uneven sequence lengths or tokens)."
    several = len(culprit.ranks) > 1
    if culprit.scope == "stage":
        lead = f"Stage {culprit.stage} (rank{'s' if several else ''} {ranks}) computes {more} longer {span} than the other stages"
        return f"{lead}: {_of_stage(reason, several)}."
    who = {"node": f"The node of ranks {ranks}", "team": f"Each of ranks {ranks}, which work on the same tokens,"}.get(culprit.scope)
    return _of_rank(study, culprit, reason, who or f"Rank {ranks}", span)


def _of_stage(reason: Reason, several: bool) -> str:
    if reason.kind == "slower_kernels":
        times = f"its kernels take {reason.factor:.2f} times as long as theirs"
        return f"{times}, on all of its ranks, so each holds more work" if several else f"{times}: more work in each, or a slower device"
    return f"it runs {reason.factor:.2f} times as many kernels" if reason.factor > 1 else "it holds more work"


def _beyond(study: Study, culprit: Culprit, reason: Reason) -> tuple[float, float]:
    """(what the culprit's work of this kind takes more than its peers' where it is slower, the same in all) of a step [ns]."""
    loads, share = study.search.loads, study.graph.steps * len(culprit.ranks)
    if reason.kind not in (*_COMPUTES, "host", "gap"):
        return culprit.excess_ns, culprit.excess_ns
    computes = reason.kind in _COMPUTES
    excess = loads.compute_excess if computes else loads.gap_excess
    return float(excess[culprit.entries].sum()) / share, loads.net(culprit.entries)[0 if computes else 1] / share


def _of_rank(study: Study, culprit: Culprit, reason: Reason, who: str, span: str) -> str:
    above, in_all = _beyond(study, culprit, reason)
    if in_all <= 0:
        what = "computes longer" if reason.kind in _COMPUTES else "is held up longer between operators"
        return f"{who} {what} than its peers in some places of {span}, {format_ns(above)} in all, and as much less long in others."
    more = format_ns(min(above, study.search.step_ns))
    where = f" where it is slower ({format_ns(in_all)} in all)" if in_all < _NEARLY * above else ""
    computes = f"computes {more} longer {span} than its peers{where}"
    if above < _NEARLY * culprit.excess_ns:  # the rest of what the replay takes away are gaps
        computes = f"needs {format_ns(min(culprit.excess_ns, study.search.step_ns))} longer {span} than its peers where it is slower, "
        computes += f"{more} of it in compute"
    longer, later = f"{more} longer {span} than its peers{where}", f"{more} later {span} than its peers'{where}"
    if reason.kind == "more_kernels":
        return f"{who} {computes}: it runs {reason.factor:.2f} times as many kernels."
    if reason.kind == "slower_kernels":
        return f"{who} {computes}: the same kernels take {reason.factor:.2f} times as long there{_examples(reason)}."
    if reason.kind == "tokens":
        return f"{who} {computes}, in kernels that depend on its tokens{_examples(reason)}: its experts get more of them."
    if reason.kind == "host":
        return f"The host of {who[0].lower()}{who[1:]} launches its work {later}{_doing(reason)}."
    if reason.kind == "pause":
        when = f"in {plural(culprit.steps, 'step')} of {study.graph.steps}"
        cost = f"{format_ns(culprit.excess_ns * study.graph.steps)} in all"
        return f"The host of {who[0].lower()}{who[1:]} stopped {when}{_doing(reason)}: {cost} more than its peers."
    if reason.kind == "gap" and _on_cpu(study):
        return f"{who} spends more of {span} between operators than its peers, and nothing in the trace says what it did."
    if reason.kind == "gap":
        # gaps of several streams may cover each other: their sum is no time of a step
        return f"The device of {who[0].lower()}{who[1:]} waits longer for work than its peers', and nothing in the trace says for what."
    return f"{who} needs {longer}."


def _examples(reason: Reason) -> str:
    return f" (most of all {shortened(reason.name)})" if reason.name else ""


def _doing(reason: Reason) -> str:
    """What the host did meanwhile, with the name of its range."""
    if not reason.name:
        return ""
    name = shortened(reason.name)
    if not reason.doing:
        return f" while it is in {name}"
    return f" because of {reason.doing} ({name})" if reason.doing.startswith("the ") else f" while {reason.doing} ({name})"


def _consequences(study: Study, culprit: Culprit, waits: pd.DataFrame, span: str, steps: int) -> list[str]:
    """Who waits for it, and who arrives late with it."""
    if culprit.scope == "moving" or not len(waits):
        return []
    said = []
    if culprit.scope == "stage" and (even := scenario(study, "equal_stages").step_ns) is not None and even < study.step_ns:
        said.append(f"Spread evenly over all stages, the same work would make {span} {format_ns(study.step_ns - even)} shorter.")
    others = waits[~waits["rank"].isin(culprit.ranks) & ~waits["pipeline"]]
    waited = others.groupby("rank")["wait_in_steps_ns"].sum() / steps
    waited = waited[waited > thresholds.STRAGGLER.info * study.search.step_ns]
    if len(waited):
        mean = format_ns(float(waited.mean()))
        least = "at least " if study.job.unread else ""
        said.append(f"{plural(len(waited), 'rank')} wait{'s' if len(waited) == 1 else ''} {least}{mean} {span} in collectives.")
    mates = _mates(study, culprit)
    if mates:
        name = f"rank {culprit.ranks[0]} is the cause" if len(culprit.ranks) == 1 else "they inherit its lateness"
        said.insert(0, f"Ranks {_ranks(mates)} arrive late at other collectives; {name}.")
    return said


def _evened(study: Study, culprit: Culprit, reason: Reason, span: str) -> list[str]:
    """Tokens do not vanish: what their even spread over the ranks that share the experts would win."""
    if reason.kind != "tokens":
        return []
    sizes = [len(g.ranks) for g in study.job.groups.groups if g.ranks and culprit.ranks[0] in g.ranks and role_of_axis(g.axis) == "expert"]
    if not sizes or min(sizes) < 2:
        return []
    ranks = min(sizes)
    won = format_ns(culprit.gain_ns * (ranks - 1) / ranks)
    return [f"Spread evenly over the {ranks} ranks that share the experts, the same tokens would make {span} about {won} shorter."]


def _mates(study: Study, culprit: Culprit) -> Sequence[int]:
    """Ranks that share a group with the culprit and come last in collectives that it is in no part of."""
    job = study.job
    if len(culprit.ranks) != 1:
        return ()
    rank = culprit.ranks[0]
    inner = [group.ranks for group in job.groups.groups if group.ranks and rank in group.ranks and len(group.ranks) < (job.world_size or 0)]
    late = job.matches[(job.matches["last_start_ns"] - job.matches["first_start_ns"]) > 0.01 * study.search.step_ns]
    without = [number < 0 or rank not in (job.groups[number].ranks or ()) for number in late["group"].tolist()]
    last = set(late[np.array(without, np.bool_) & (late["kind"] != "send").to_numpy()]["last_rank"].tolist())
    mates = last & {member for ranks in inner for member in ranks}
    return sorted(mates | {rank}) if mates else ()


def _waited(waits: pd.DataFrame, steps: int) -> float:
    """What a rank waits in collectives a step [ns], on average."""
    each = waits[~waits["pipeline"]].groupby("rank")["wait_in_steps_ns"].sum() / max(steps, 1)
    return float(each.mean()) if len(each) else 0.0


def _none(study: Study, waited: float) -> list[Finding]:
    """Ranks that can be compared and do not differ: that is worth a sentence too."""
    if len(study.places.ranks) < 2 or not study.graph.joins:
        return []
    loads = study.search.loads
    total = pd.Series(loads.compute).groupby(loads.rank).sum()
    stage = pd.Series(study.places.stage, index=study.places.ranks)
    of_stage = total.groupby(stage.reindex(total.index).to_numpy())
    spread = float(((of_stage.max() - of_stage.min()) / of_stage.median().clip(lower=1)).max())
    text = f"No straggler: ranks of one stage differ by {spread:.1%} in compute, and what any does more than its peers"
    text += " costs a step less than 1%."
    if waited > thresholds.IDLE_WAITING.warning * study.search.step_ns:
        text = "No single rank is the straggler: without the excess of any one over its peers a step is less than 1% shorter. Yet a rank "
        text += f"waits {'at least ' if study.job.unread else ''}{format_ns(waited)} a step in collectives: several come late."
    doubt, steps = study.search.by_chance, study.graph.steps
    if doubt is not None and doubt.scope == "rank":
        share = doubt.gain_ns / study.search.step_ns
        when = "the one step that was recorded" if steps == 1 else f"the {steps} steps that were recorded"
        text = f"No straggler beyond chance: without the excess of rank {doubt.ranks[0]} over its peers a step would be "
        text += f"{format_ns(doubt.gain_ns)} shorter ({share:.1%}), which ranks that are alike may well show in {when}."
    if study.job.unread:
        text = f"{text[:-1]}, among the {len(study.places.ranks)} ranks that were read."
    return [Finding("stragglers.none", "info", text, spread, "share", _evidence(study), absorbs=_ABSORBED)]
