"""The load of one layer of experts (or of all layers of a process group) over all recorded steps, and how uneven it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

from tracekit.analyses.experts.rows import Layer
from tracekit.job.model import Job
from tracekit.schema import Column, table
from tracekit.units import NULL

_EVEN = "every exchange gives all ranks the same number of rows: they may be padded, and then do not tell the tokens"
_PARTLY = "not all ranks that hold the layer's experts were read"
_PADDED = "the exchange is padded, and not all ranks that send to these experts were read"


_WHY = "not recorded: not_measured in the JSON has the reason"
LAYERS = table(
    "experts",
    Column("label", "str", "", "the layer, or the process group", "Layer"),
    Column("layer", "str", "", "name of the layer", "", "layer", "the exchanges of a group are taken together"),
    Column("group", "str", "", "id of the process group whose layers are taken together", "", "group", "the manifests name the layer"),
    Column("axis", "str", "", "mesh axis of that group", "", "axis", "the manifests name the layer"),
    Column("load_from", "str", "", "`manifest`, `exchanges`", "", "load_from"),
    Column("experts", "object", "", "experts of the layer", "", "experts"),
    Column("top_k", "object", "", "choices a token", "", "top_k"),
    Column("capacity", "object", "", "most tokens of one rank for one expert; `null`: no limit, or not known", "", "capacity"),
    Column("padded", "object", "", "exchanges are filled up to the capacity", "", "padded"),
    Column("steps", "int64", "", "recorded steps", "", "steps"),
    Column("tokens_by_rank", "object", "", "tokens that each rank's experts received", "", "tokens_by_rank"),
    Column("tokens_by_expert", "object", "", "tokens that each expert received", "", "tokens_by_expert"),
    Column("received_bytes_by_rank", "object", "bytes", "what the exchanges brought; `null` by manifests", "", "received_bytes_by_rank"),
    Column("imbalance", "float64", "", "most / mean of the ranks (of bytes where tokens are not known)", "Most / mean of the ranks",
           "imbalance", _WHY),
    Column("mean_imbalance", "float64", "", "the same of each step, of exchanges of each one, on average", "The same a step, mean",
           "mean_imbalance", _WHY),
    Column("expert_imbalance", "float64", "", "most / mean of the experts", "Most / mean of the experts", "expert_imbalance", _WHY),
    Column("worst_step", "object", "", "`step`, `rank` and `imbalance` of the most uneven step", "", "worst_step"),
    Column("routed_tokens", "object", "", "choices of all ranks that were kept", "", "routed_tokens"),
    Column("dropped_tokens", "object", "", "choices that were beyond the capacity", "", "dropped_tokens"),
    Column("dropped_share", "float64", "share", "dropped / (routed + dropped)", "Dropped", "dropped_share", _WHY),
    Column("not_measured", "object", "", "key -> why it is `null`", "", "not_measured"),
)  # fmt: skip


@dataclass(frozen=True)
class Load:
    """One layer, over all recorded steps. Mappings are empty and figures None where something is not known; ``layer.reasons`` say why.

    ``mean_imbalance``: the imbalance of each step (of exchanges: of each one), on average; ``worst``: (step, rank, imbalance) of the step
    with the largest one, where steps are known.
    """

    layer: Layer
    group: str
    axis: str
    steps: int
    tokens_by_rank: dict[int, int | None]
    tokens_by_expert: dict[int, int]
    bytes_by_rank: dict[int, int]
    imbalance: float | None
    mean_imbalance: float | None
    expert_imbalance: float | None
    worst: tuple[int, int, float] | None

    @property
    def name(self) -> str:
        """For a sentence."""
        return self.layer.name or f"the experts of group {self.group}"

    @property
    def label(self) -> str:
        """For a table."""
        return self.layer.name or f"group {self.group}"

    @property
    def dropped_share(self) -> float | None:
        """Dropped choices of tokens, of all."""
        if self.layer.dropped is None or self.layer.routed is None or not self.layer.dropped + self.layer.routed:
            return None
        return self.layer.dropped / (self.layer.dropped + self.layer.routed)

    @property
    def telling(self) -> float | None:
        """The imbalance that costs time: of the sums of a layer; where layers are not known apart, of the mean exchange."""
        return self.imbalance if self.layer.name else self.mean_imbalance

    def row(self) -> dict[str, Any]:
        """The row of table LAYERS."""
        layer, worst = self.layer, self.worst
        return {
            "label": self.label,
            "layer": layer.name,
            "group": self.group,
            "axis": self.axis,
            "load_from": "manifest" if layer.name else "exchanges",
            "experts": layer.experts,
            "top_k": layer.top_k,
            "capacity": layer.capacity,
            "padded": layer.padding,
            "steps": self.steps,
            "tokens_by_rank": self.tokens_by_rank or None,
            "tokens_by_expert": self.tokens_by_expert or None,
            "received_bytes_by_rank": self.bytes_by_rank or None,
            "imbalance": self.imbalance,
            "mean_imbalance": self.mean_imbalance,
            "expert_imbalance": self.expert_imbalance,
            "worst_step": None if worst is None else {"step": worst[0], "rank": worst[1], "imbalance": worst[2]},
            "routed_tokens": layer.routed,
            "dropped_tokens": layer.dropped,
            "dropped_share": self.dropped_share,
            "not_measured": layer.reasons,
        }


def of_layer(layer: Layer, part: pd.DataFrame) -> Load:
    """The load of a layer by its rows of LOADS, one an expert and step."""
    lost = sorted(set(part["rank"][part["tokens"] == NULL].tolist()))
    known = part[~part["rank"].isin(lost)]
    totals, experts = known.groupby("rank")["tokens"].sum(), known.groupby("expert")["tokens"].sum()
    partly = not lost and layer.experts is not None and len(experts) < layer.experts
    if lost:
        layer.reasons |= dict.fromkeys(("tokens_by_rank", "tokens_by_expert", "imbalance"), _PADDED)
    elif partly:
        layer.reasons["imbalance"] = _PARTLY
    whole = not (lost or partly)
    each = known.groupby(["part", "rank"])["tokens"].sum()
    ratios = _ratios(each if whole else each.iloc[:0])
    return Load(
        layer=layer,
        group="",
        axis="",
        steps=part["part"].nunique(),
        tokens_by_rank=dict(sorted({**dict.fromkeys(lost), **_counts(totals)}.items())),
        tokens_by_expert={} if lost else _counts(experts),
        bytes_by_rank={},
        imbalance=_ratio(totals) if whole else None,
        mean_imbalance=float(ratios.mean()) if len(ratios) else None,
        expert_imbalance=_ratio(experts) if whole else None,
        worst=_worst(each, ratios) if len(ratios) else None,
    )


def of_exchanges(layer: Layer, part: pd.DataFrame, job: Job) -> Load:
    """The load of all layers of a group by its rows of LOADS, one an exchange and rank."""
    number = int(part["group"].iloc[0])
    group = job.groups[number] if number >= 0 else None
    split, sized = bool((part["tokens"] != NULL).all()), bool((part["bytes"] != NULL).all())
    column = "tokens" if split else "bytes"
    each = _complete(part).groupby(["part", "rank"])[column].sum()
    even = len(each) > 0 and bool((each.groupby("part").nunique() == 1).all())
    totals = each.groupby("rank").sum()
    if even:
        layer.reasons |= dict.fromkeys(("tokens_by_rank", "imbalance"), _EVEN)
    elif not split:
        layer.reasons["tokens_by_rank"] = "the exchanges have no split sizes; bytes are given instead"
    if not len(each) or not (split or sized):
        layer.reasons["imbalance"] = "no exchange was found on all ranks of its group" if split or sized else "no sizes were recorded"
    measured = not even and len(each) > 0 and (split or sized)
    ratios = _ratios(each if measured else each.iloc[:0])
    return Load(
        layer=layer,
        group="" if group is None else group.id,
        axis="" if group is None else group.axis,
        steps=part["step"].nunique(),
        tokens_by_rank=dict(_counts(part.groupby("rank")["tokens"].sum())) if split and not even else {},
        tokens_by_expert={},
        bytes_by_rank=_counts(part.groupby("rank")["bytes"].sum()) if sized else {},
        imbalance=_ratio(totals) if measured else None,
        mean_imbalance=float(ratios.mean()) if len(ratios) else None,
        expert_imbalance=None,
        worst=None,
    )


def _counts(totals: pd.Series[Any]) -> dict[int, int]:
    return {int(str(key)): int(total) for key, total in totals.items()}


def _complete(part: pd.DataFrame) -> pd.DataFrame:
    """Only exchanges that were matched on as many ranks as any of them."""
    matched = part[part["part"] >= 0]
    ranks = matched.groupby("part")["rank"].transform("nunique")
    complete: pd.DataFrame = matched[(ranks == ranks.max()) & (ranks > 1)]
    return complete


def _ratio(totals: pd.Series[Any]) -> float | None:
    """Most over mean; None where there is nothing."""
    return float(totals.max() / totals.mean()) if len(totals) and totals.sum() > 0 else None


def _ratios(each: pd.Series[Any]) -> pd.Series[Any]:
    """Most over mean of the ranks of each part; parts without any token are left out."""
    groups = each.groupby("part")
    return (groups.max() / groups.mean())[groups.sum() > 0]


def _worst(each: pd.Series[Any], ratios: pd.Series[Any]) -> tuple[int, int, float]:
    step = int(str(ratios.idxmax()))
    return step, int(str(each[step].idxmax())), float(ratios[step])
