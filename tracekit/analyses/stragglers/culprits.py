"""Sentences about who makes a step longer: the cause that a replay confirms, what it costs, and who inherits its lateness."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from tracekit.analyses import _thresholds as thresholds
from tracekit.findings import Finding, Subject
from tracekit.graph.causes import Reason, reason_of
from tracekit.graph.culprits import Culprit
from tracekit.graph.study import Study
from tracekit.units import format_ns, listed, plural, shortened

_ADVICE = {
    "more_kernels": "Find what this rank computes more of: uneven layers or parameters, another code path, evaluation or logging on one rank.",
    "slower_kernels": "Compare this device's clocks, temperature and power (nvidia-smi -q -d CLOCK,PERFORMANCE; rocm-smi) with its peers'; "
    "exchange it if they differ, look for larger inputs if they don't.",
    "tokens": "Balance the router (auxiliary loss, bias), limit the capacity, or place the busiest experts on other ranks.",
    "host": "Move that work off the training loop's thread, or spread it over all ranks: data loading in worker processes with prefetch, "
    "saving and logging in the background.",
    "pause": "Look for what happened once: garbage collection (gc.disable and a collection on all ranks together), a checkpoint, "
    "the allocator, another process on that host.",
    "gap": "The trace does not say what this rank waited for: record its host (CPU activity) and stream waits (enable_cuda_sync_events).",
    "link": "Check that link: cable, network card, placement of the group's ranks, and what else uses it.",
    "stage": "Move layers from this stage to others, or give it less: an even split by measured time, not by number of layers.",
    "moving": "Even out the work of one step: pack or bucket sequences by length, balance tokens over ranks, not samples.",
}


def _ranks(ranks: Sequence[int]) -> str:
    """``0, 2`` or, of neighbours, ``128-135``."""
    first, last = min(ranks, default=0), max(ranks, default=0)
    return f"{first}-{last}" if len(ranks) > 2 and last - first + 1 == len(ranks) else listed(ranks, 12)


def findings_of(study: Study, waits: pd.DataFrame, span: str) -> list[Finding]:
    """One finding a cause; where there is none and ranks can be compared, that there is none."""
    search = study.search
    if not study.trusted:
        text = f"The replay misses the measured step by {study.error:.0%}: who makes it longer is not concluded from it."
        return [Finding("stragglers.not_replayed", "info", text, study.error, "share", "what_if", "")]
    found = []
    for number, culprit in enumerate(search.culprits):
        found.append(_finding(study, culprit, reason_of(study, culprit), waits, span, first=number == 0))
    return found or _none(study)


def _finding(study: Study, culprit: Culprit, reason: Reason, waits: pd.DataFrame, span: str, first: bool) -> Finding:
    share = culprit.gain_ns / study.search.step_ns
    gain = f"Without it {span} would be {format_ns(culprit.gain_ns)} shorter ({share:.1%})."
    missing = len(study.job.missing_ranks)
    if missing:
        gain = f"Without it {span} would be at least {format_ns(culprit.gain_ns)} shorter ({share:.1%}); it is a possible cause only: "
        gain += f"{plural(missing, 'rank')} of the job {'were' if missing > 1 else 'was'} not read."
    group = study.job.groups[culprit.group].id if culprit.group is not None else None
    subject = Subject(culprit.ranks if culprit.scope != "moving" else (), culprit.axis or None, culprit.stage, group=group)
    if culprit.scope == "rank" and culprit.stage is None and study.places.stages:
        own = int(study.places.stage[study.places.ranks == culprit.ranks[0]][0])
        subject = Subject(culprit.ranks, stage=own)
    return Finding(
        id={"group": "links.slow_group", "stage": "pipeline.slow_stage", "moving": "stragglers.moving"}.get(culprit.scope, "stragglers.rank"),
        severity=thresholds.GAIN.of(share) or "info",
        text=f"{_what(study, culprit, reason, span)} {gain}",
        value=culprit.gain_ns / 1000,
        unit="us",
        evidence=f"replay of {plural(study.graph.steps, 'step')} over {plural(len(study.places.ranks), 'rank')} "
        f"(it misses the measured step by {study.error:.1%})",
        advice=_ADVICE[reason.kind],
        weight_ns=int(culprit.gain_ns),
        gain_ns=int(culprit.gain_ns),
        subject=subject,
        consequences=tuple(_consequences(study, culprit, waits, span)) if first else (),
    )


def _what(study: Study, culprit: Culprit, reason: Reason, span: str) -> str:
    """The cause in a sentence."""
    more = format_ns(culprit.excess_ns)
    who = f"Rank {culprit.ranks[0]}" if len(culprit.ranks) == 1 else f"Ranks {_ranks(culprit.ranks)}"
    if culprit.scope == "node":
        who = f"The node of ranks {_ranks(culprit.ranks)}"
    peers = "the other stages" if culprit.scope == "stage" else "its peers"
    if culprit.scope == "group":
        return f"Transfers of the {culprit.axis} group of ranks {_ranks(culprit.ranks)} take {more} longer {span} than those of the other groups of the axis."
    if culprit.scope == "moving":
        return f"Another rank is slow in each step: the slowest one needs {more} more than its peers (uneven sequence lengths or tokens)."
    if culprit.scope == "stage":
        ranks = f"rank{'s' if len(culprit.ranks) > 1 else ''} {_ranks(culprit.ranks)}"
        why = {"slower_kernels": f"its kernels take {reason.factor:.2f} times as long as theirs", "stage": "it holds more work"}
        return f"Stage {culprit.stage} ({ranks}) computes {more} longer {span} than the other stages: {why.get(reason.kind, 'it holds more work')}."
    return {
        "more_kernels": f"{who} computes {more} longer {span} than {peers}: it runs {reason.factor:.2f} times as many kernels.",
        "slower_kernels": f"{who} computes {more} longer {span} than {peers}: the same kernels take {reason.factor:.2f} times as long "
        f"there{_examples(reason)}.",
        "tokens": f"{who} computes {more} longer {span} than {peers}, in kernels that depend on its tokens{_examples(reason)}: its experts get more of them.",
        "host": f"{who}'s host launches its work {more} later {span} than {peers}'{_doing(reason)}.",
        "pause": f"{who}'s host stopped in {plural(culprit.steps, 'step')} of {study.graph.steps}{_doing(reason)}: {more} more {span}, on average, than {peers}.",
        "gap": f"{who}'s device waits {more} longer {span} than {peers}' for work, with nothing in the trace that says for what.",
    }.get(reason.kind, f"{who} needs {more} more {span} than {peers}.")  # fmt: skip


def _examples(reason: Reason) -> str:
    return f" (most of all {shortened(reason.name)})" if reason.name else ""


def _doing(reason: Reason) -> str:
    if not reason.name:
        return ""
    words = f" while {reason.doing}" if reason.doing and not reason.doing.startswith("the ") else f" because of {reason.doing}" if reason.doing else ""
    return f"{words} ({shortened(reason.name)})" if words else f" while it is in {shortened(reason.name)}"


def _consequences(study: Study, culprit: Culprit, waits: pd.DataFrame, span: str) -> list[str]:
    """Who waits for it, and who arrives late with it."""
    if culprit.scope == "moving" or not len(waits):
        return []
    others = waits[~waits["rank"].isin(culprit.ranks) & ~waits["pipeline"]]
    waited = others.groupby("rank")["wait_in_steps_ns"].sum() / study.graph.steps
    waited = waited[waited > thresholds.STRAGGLER.info * study.search.step_ns]
    said = [f"{plural(len(waited), 'rank')} wait{'s' if len(waited) == 1 else ''} {format_ns(float(waited.mean()))} {span} in collectives."] if len(waited) else []
    mates = _mates(study, culprit)
    if mates:
        name = f"rank {culprit.ranks[0]} is the cause" if len(culprit.ranks) == 1 else "they inherit its lateness"
        said.insert(0, f"Ranks {_ranks(mates)} arrive late at other collectives; {name}.")
    return said


def _mates(study: Study, culprit: Culprit) -> Sequence[int]:
    """Ranks that share a group with the culprit and come last in collectives that it is in no part of."""
    job = study.job
    if len(culprit.ranks) != 1:
        return ()
    rank = culprit.ranks[0]
    near = {member for group in job.groups.groups if group.ranks and rank in group.ranks and len(group.ranks) < (job.world_size or 0)
            for member in group.ranks}  # fmt: skip
    last = job.matches[(job.matches["last_start_ns"] - job.matches["first_start_ns"]) > 0.01 * study.search.step_ns]
    own = np.array([rank in (job.groups[int(g)].ranks or ()) if g >= 0 else False for g in last["group"]], np.bool_)
    often = last[~own & (last["kind"] != "send").to_numpy()]["last_rank"].value_counts()
    return sorted({int(r) for r in often.index.tolist() if r in near} | ({rank} if any(r in near for r in often.index) else set())) if len(often) else ()


def _none(study: Study) -> list[Finding]:
    """Ranks that can be compared and do not differ: that is worth a sentence too."""
    if len(study.places.ranks) < 2 or not study.graph.joins:
        return []
    loads = study.search.loads
    total = pd.Series(loads.compute).groupby(loads.rank).sum()
    stage = pd.Series(study.places.stage, index=study.places.ranks)
    of_stage = total.groupby(stage.reindex(total.index).to_numpy())
    spread = float(((of_stage.max() - of_stage.min()) / of_stage.median().clip(lower=1)).max())
    text = f"No straggler: ranks with the same work differ by {spread:.1%} in compute, and no rank, node, group or stage alone makes a step 1% longer."
    return [Finding("stragglers.none", "info", text, spread, "share", f"replay of {plural(study.graph.steps, 'step')}")]
