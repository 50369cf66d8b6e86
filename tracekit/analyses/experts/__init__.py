"""Balance of a mixture of experts: how many tokens each rank's experts received, how uneven that is, and how many were dropped.

    imbalance = most tokens on one rank / mean over the ranks that hold the layer's experts

The rank with the most tokens sets the time of the layer; the others wait for it in the exchange that brings the results back. The same
figure over experts (``expert_imbalance``) says whether the router is uneven, or only the placement of experts on ranks.
A token counts once for every expert that it is sent to. Where the load comes from: ``experts.rows``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from tracekit.analyses import _thresholds as thresholds
from tracekit.analyses.experts.load import LAYERS, Load, of_exchanges, of_layer
from tracekit.analyses.experts.rows import exchanged, recorded
from tracekit.findings import Finding, Heatmap, Section, Table
from tracekit.job.model import Job
from tracekit.units import capitalized, listed, plural

ORDER = 47

_EVIDENCE = "experts, all recorded steps"
_NOTHING = "no manifest tells the load of experts, and no exchange runs along an expert axis"


@dataclass(frozen=True)
class Experts:
    """One ``Load`` a layer (of exchanges: a process group); ``reason`` where there is none."""

    loads: Sequence[Load]
    notes: Sequence[str]
    reason: str = ""

    def findings(self) -> list[Finding]:
        """The most uneven layer, tokens that were dropped, experts that get none."""
        return [*self._imbalance(), *self._dropped(), *self._unused()]

    def sections(self) -> list[Section]:
        """Tokens by layer and rank, by layer and expert, and every layer in figures."""
        if not self.loads:
            return []
        lead = "A token counts once for every expert it is sent to. The rank with the most tokens sets the time of a layer."
        by_rank, by_expert = [load.tokens_by_rank for load in self.loads], [load.tokens_by_expert for load in self.loads]
        charts = [chart for chart in (self._heatmap("rank", by_rank), self._heatmap("expert", by_expert)) if chart is not None]
        notes = [f"{capitalized(note)}." for note in self.notes]
        return [Section("Experts", " ".join([lead, *notes]), (*charts, Table.of("Layers", LAYERS, self._rows)), name="experts")]

    def json(self) -> dict[str, Any]:
        """``experts``: one entry a layer; null, with the reason, where none is known."""
        if not self.loads:
            return {"not_measured": {"experts": self.reason}}
        said = {"not_measured": {"experts": "; ".join(self.notes)}} if self.notes else {}
        return {"experts": LAYERS.records(self._rows), **said}

    def _imbalance(self) -> list[Finding]:
        uneven = [(load.telling, load) for load in self.loads if load.telling is not None]
        if not uneven:
            return []
        value, worst = max(uneven, key=lambda pair: pair[0])
        severity = thresholds.EXPERT_IMBALANCE.of(value)
        if severity is None:
            return []
        counts = {rank: tokens for rank, tokens in worst.tokens_by_rank.items() if tokens is not None} or worst.bytes_by_rank
        rank, unit = max(counts, key=counts.__getitem__), "tokens" if worst.tokens_by_rank else "bytes"
        of_all = f"{counts[rank]:,} of {sum(counts.values()):,} {unit}"
        if worst.layer.name:
            text = f"Rank {rank} gets {value:.2f} times the mean in {worst.name}: {of_all}"
        else:
            text = f"In the mean exchange of {worst.name} the fullest rank gets {value:.2f} times the mean"
            text += f"; in all rank {rank} gets the most, {of_all}"
        limit = thresholds.EXPERT_IMBALANCE.warning
        above = sum(other >= limit for other, _ in uneven)
        text += f"; {above} of {len(self.loads)} layers are above {limit}." if above > 1 and worst.layer.name else "."
        if worst.expert_imbalance is not None:
            text += f" The busiest expert gets {worst.expert_imbalance:.2f} times the mean expert."
        if worst.layer.padding:  # nobody waits for the fullest rank
            text += " Exchanges are padded: every rank computes as many rows, those without a token for nothing."
            advice = "Balance the router (auxiliary loss, or a bias without one): fewer tokens are dropped, and fewer rows are empty."
            return [Finding("experts.imbalance_padded", "info", text, value, "most / mean", _EVIDENCE, advice, row={"Layer": worst.label})]
        advice = "Balance the router (auxiliary loss, or a bias without one), give experts a capacity, or place busy experts apart."
        return [Finding("experts.imbalance", severity, text, value, "most / mean", _EVIDENCE, advice, row={"Layer": worst.label})]

    def _dropped(self) -> list[Finding]:
        known = [load for load in self.loads if load.dropped_share is not None]
        dropped = sum(load.layer.dropped or 0 for load in known)
        choices = dropped + sum(load.layer.routed or 0 for load in known)
        severity = thresholds.DROPPED_TOKENS.of(dropped / choices) if choices else None
        if severity is None:
            return []
        worst = max(known, key=lambda load: load.dropped_share or 0.0)
        text = f"{dropped / choices:.1%} of the tokens' choices of experts are dropped ({dropped:,} of {choices:,})"
        text += f", most in {worst.name} ({worst.dropped_share:.1%})." if len(known) > 1 else "."
        advice = "Raise the capacity factor or balance the router; a dropped token passes the layer by."
        return [
            Finding(
                "experts.dropped",
                severity,
                text,
                dropped / choices,
                "share of choices",
                "experts, dropped_tokens",
                advice,
                row={"Layer": worst.label},
            )
        ]

    def _unused(self) -> list[Finding]:
        labels = {load.name: load.label for load in self.loads}
        idle = {load.name: [e for e, tokens in load.tokens_by_expert.items() if not tokens] for load in self.loads}
        idle = {name: experts for name, experts in idle.items() if experts}
        if not idle:
            return []
        count, name = sum(map(len, idle.values())), max(idle, key=lambda layer: len(idle[layer]))
        text = f"{plural(count, 'expert')} got no token in any recorded step, most in {name}: {listed(idle[name])}."
        advice = "In a few steps that may be chance; over many the router has collapsed, and these parameters are not trained."
        return [
            Finding(
                "experts.unused", "info", text, float(count), "experts", "experts, tokens_by_expert", advice, row={"Layer": labels[name]}
            )
        ]

    def _heatmap(self, what: str, loads: Sequence[dict[int, Any]]) -> Heatmap | None:
        columns = sorted({key for load in loads for key in load})
        if not columns:
            return None
        names = [load.label for load in self.loads]
        values = [[load.get(column) for column in columns] for load in loads]
        shown = [str(column) for column in columns]
        return Heatmap(f"Tokens by layer and {what}", shown, names, values, "tokens", x_title=what, note="Summed over all recorded steps.")

    @cached_property
    def _rows(self) -> pd.DataFrame:
        """Table LAYERS."""
        rows = [load.row() for load in self.loads]
        return LAYERS.frame({name: pd.Series([row[name] for row in rows], dtype=object) for name in LAYERS.names})


def analyze(job: Job) -> Experts:
    """Bring together what is known of the load of experts on every rank."""
    layers, loads, notes = recorded(job)
    if job.missing_ranks:
        lost = plural(len(job.missing_ranks), "rank was", "ranks were")
        notes.append(f"{lost} not read: sums and means are of the others")
    if layers:
        parts = dict(list(loads.groupby("layer", sort=False)))
        return Experts([of_layer(layer, parts.get(layer.name, loads.iloc[:0])) for layer in layers], notes)
    by_group, loads, more = exchanged(job)
    if not by_group:
        return Experts([], notes, "; ".join([_NOTHING, *notes]))
    return Experts([of_exchanges(layer, loads[loads["group"] == group], job) for group, layer in by_group.items()], [*notes, *more])
