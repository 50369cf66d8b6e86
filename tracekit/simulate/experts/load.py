"""Load of experts and ranks: who gets how many tokens, and the tables that say so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pandas as pd

from tracekit.findings import Table
from tracekit.simulate.experts.layer import Weights
from tracekit.simulate.experts.ranks import Exchange
from tracekit.simulate.functions import Float
from tracekit.simulate.experts.routing import Routing


@dataclass(frozen=True)
class Problem:
    """Weights, and of every rank its tokens, the gradient of their output and their choices; ``capacity`` None: no limit."""

    weights: Weights
    xs: list[Float]
    dys: list[Float]
    routings: list[Routing]
    capacity: int | None

    @property
    def whole_routing(self) -> Routing:
        """All ranks' choices as those of one."""
        mine = self.routings
        return Routing(
            np.concatenate([one.probabilities for one in mine]),
            np.concatenate([one.experts for one in mine]),
            np.concatenate([one.weights for one in mine]),
            np.concatenate([one.kept for one in mine]),
            mine[0].normalised,
        )

    @property
    def owners(self) -> list[np.ndarray[tuple[int, ...], np.dtype[np.int64]]]:
        """For every rank the expert ranks of its kept choices."""
        local = len(self.weights.first) // len(self.xs)
        return [one.experts[one.kept] // local for one in self.routings]


def asked_of(routing: Routing) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Choices of each expert by one rank, kept or not."""
    return np.bincount(routing.experts.reshape(-1), minlength=routing.probabilities.shape[1])


def loads_of(problem: Problem) -> tuple[list[int], list[int]]:
    """Kept choices by expert, and by the experts' rank."""
    by_expert = np.sum([np.bincount(one.experts[one.kept], minlength=one.probabilities.shape[1]) for one in problem.routings], axis=0)
    return by_expert.tolist(), by_expert.reshape(len(problem.xs), -1).sum(axis=1).tolist()


def imbalance(loads: Sequence[int]) -> Fraction:
    """Most over mean; 1 where there is nothing at all."""
    return Fraction(max(loads) * len(loads), sum(loads)) if sum(loads) else Fraction(1)


def expert_table(problem: Problem, pad: bool) -> Table:
    """Load of every expert."""
    count = len(problem.weights.first)
    asked = np.sum([asked_of(one) for one in problem.routings], axis=0).tolist()
    kept, _ = loads_of(problem)
    mean = sum(kept) / len(kept)
    room = None if problem.capacity is None else problem.capacity * len(problem.xs)
    frame = pd.DataFrame(
        {
            "expert": list(range(count)),
            "rank": [expert // (count // len(problem.xs)) for expert in range(count)],
            "asked": asked,
            "room": [room] * count,
            "kept": kept,
            "dropped": [a_ - k for a_, k in zip(asked, kept, strict=True)],
            "padding": [(room or 0) - k if pad else 0 for k in kept],
            "of_mean": [k / mean if mean else None for k in kept],
        }
    )
    columns = {
        "expert": "expert",
        "rank": "on rank",
        "asked": "chosen by tokens",
        "room": "room of all ranks [tokens]",
        "kept": "tokens",
        "dropped": "dropped",
        "padding": "padding [rows]",
        "of_mean": "of the mean load",
    }
    missing = {"room": "no capacity factor: there is no limit", "of_mean": "no expert has a token"}
    note = "Each rank has room for C tokens for each expert." if room is not None else ""
    return Table("Experts", frame, columns, note, preview=count, missing=missing)


def rank_table(problem: Problem, exchange: Exchange, pad: bool) -> Table:
    """What every rank sends and gets."""
    _, loads = loads_of(problem)
    mean, local = sum(loads) / len(loads), len(problem.weights.first) // len(problem.xs)
    rows = []
    for rank, routing in enumerate(problem.routings):
        padding = problem.capacity * len(problem.xs) * local - loads[rank] if pad and problem.capacity is not None else 0
        rows.append(
            {
                "rank": rank,
                "sent": int(routing.kept.sum()),
                "stays": int((problem.owners[rank] == rank).sum()),
                "dropped": int((~routing.kept).sum()),
                "lost": int((~routing.kept.any(axis=1)).sum()),
                "received": loads[rank],
                "padding": padding,
                "of_mean": loads[rank] / mean if mean else None,
                "sent_bytes": int(exchange.ranks.network.sent_bytes[rank]),
            }
        )
    columns = {
        "rank": "rank",
        "sent": "choices kept",
        "stays": "of them on the rank itself",
        "dropped": "choices dropped",
        "lost": "tokens without an expert",
        "received": "tokens at its experts",
        "padding": "padding at its experts [rows]",
        "of_mean": "of the mean load",
        "sent_bytes": "sent [bytes]",
    }
    return Table("Ranks", pd.DataFrame(rows), columns, preview=len(rows), missing={"of_mean": "no expert has a token"})


def exchange_table(exchange: Exchange) -> Table:
    """Bytes of every all-to-all by rank."""
    frame = pd.DataFrame([{"exchange": name, **{f"r{i}": size for i, size in enumerate(sizes)}} for name, sizes in exchange.sent.items()])
    columns = {"exchange": "all-to-all", **{f"r{i}": f"rank {i} sends [bytes]" for i in range(exchange.ranks.world)}}
    return Table("All-to-alls in order", frame, columns, preview=len(frame))


def choices_table(problem: Problem) -> Table:
    """Where every token goes."""
    rows = [
        {
            "rank": rank,
            "token": token,
            "choice": slot + 1,
            "expert": int(routing.experts[token, slot]),
            "weight": float(routing.weights[token, slot]),
            "fate": "sent" if routing.kept[token, slot] else "dropped",
        }
        for rank, routing in enumerate(problem.routings)
        for token, slot in np.ndindex(*routing.experts.shape)
    ]
    columns = {"rank": "rank", "token": "token", "choice": "choice", "expert": "expert", "weight": "weight", "fate": "fate"}
    return Table("Choices of every token", pd.DataFrame(rows), columns)
