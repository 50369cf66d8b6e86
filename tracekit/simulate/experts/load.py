"""Load of experts and ranks: who gets how many tokens, and the tables that say so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from tracekit.findings import Table
from tracekit.simulate.experts.layer import Weights
from tracekit.simulate.experts.ranks import Exchange
from tracekit.simulate.experts.routing import Routing
from tracekit.simulate.functions import Float
from tracekit.simulate.tables import Columns, table


@dataclass(frozen=True)
class ExpertsProblem:
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


def loads_of(problem: ExpertsProblem) -> tuple[list[int], list[int]]:
    """Kept choices by expert, and by the experts' rank."""
    by_expert = np.sum([np.bincount(one.experts[one.kept], minlength=one.probabilities.shape[1]) for one in problem.routings], axis=0)
    return by_expert.tolist(), by_expert.reshape(len(problem.xs), -1).sum(axis=1).tolist()


def imbalance(loads: Sequence[int]) -> Fraction:
    """Most over mean; 1 where there is nothing at all."""
    return Fraction(max(loads) * len(loads), sum(loads)) if sum(loads) else Fraction(1)


def expert_table(problem: ExpertsProblem, pad: bool) -> Table:
    """Load of every expert."""
    count = len(problem.weights.first)
    asked = np.sum([asked_of(one) for one in problem.routings], axis=0).tolist()
    kept, _ = loads_of(problem)
    mean = sum(kept) / len(kept)
    room = None if problem.capacity is None else problem.capacity * len(problem.xs)
    columns: Columns = {
        "expert": ("expert", range(count)),
        "rank": ("on rank", [expert // (count // len(problem.xs)) for expert in range(count)]),
        "asked": ("chosen by tokens", asked),
        "room": ("room of all ranks [tokens]", [room] * count),
        "kept": ("tokens", kept),
        "dropped": ("dropped", [number - k for number, k in zip(asked, kept, strict=True)]),
        "padding": ("padding [rows]", [(room or 0) - k if pad else 0 for k in kept]),
        "of_mean": ("of the mean load", [k / mean if mean else None for k in kept]),
    }
    missing = {"room": "no capacity factor: there is no limit", "of_mean": "no expert has a token"}
    note = "Each rank has room for C tokens for each expert." if room is not None else ""
    return table("Experts", columns, note, missing=missing)


def rank_table(problem: ExpertsProblem, exchange: Exchange, pad: bool) -> Table:
    """What every rank sends and gets."""
    _, loads = loads_of(problem)
    mean, local, routings = sum(loads) / len(loads), len(problem.weights.first) // len(problem.xs), problem.routings
    room = problem.capacity * len(problem.xs) * local if pad and problem.capacity is not None else None
    columns: Columns = {
        "rank": ("rank", range(len(loads))),
        "sent": ("choices kept", [int(one.kept.sum()) for one in routings]),
        "stays": ("of them on the rank itself", [int((owners == rank).sum()) for rank, owners in enumerate(problem.owners)]),
        "dropped": ("choices dropped", [int((~one.kept).sum()) for one in routings]),
        "lost": ("tokens without an expert", [int((~one.kept.any(axis=1)).sum()) for one in routings]),
        "received": ("tokens at its experts", loads),
        "padding": ("padding at its experts [rows]", [0 if room is None else room - load for load in loads]),
        "of_mean": ("of the mean load", [load / mean if mean else None for load in loads]),
        "sent_bytes": ("sent [bytes]", exchange.ranks.network.sent_bytes.tolist()),
    }
    return table("Ranks", columns, missing={"of_mean": "no expert has a token"})


def exchange_table(exchange: Exchange) -> Table:
    """Bytes of every all-to-all by rank."""
    by_rank = {f"r{i}": (f"rank {i} sends [bytes]", [sizes[i] for sizes in exchange.sent.values()]) for i in range(exchange.ranks.world)}
    return table("All-to-alls in order", {"exchange": ("all-to-all", list(exchange.sent)), **by_rank})


def choices_table(problem: ExpertsProblem) -> Table:
    """Where every token goes."""
    rows = [(rank, one, *index) for rank, one in enumerate(problem.routings) for index in np.ndindex(*one.experts.shape)]
    columns: Columns = {
        "rank": ("rank", [rank for rank, *_ in rows]),
        "token": ("token", [token for _, _, token, _ in rows]),
        "choice": ("choice", [slot + 1 for *_, slot in rows]),
        "expert": ("expert", [int(one.experts[token, slot]) for _, one, token, slot in rows]),
        "weight": ("weight", [float(one.weights[token, slot]) for _, one, token, slot in rows]),
        "fate": ("fate", ["sent" if one.kept[token, slot] else "dropped" for _, one, token, slot in rows]),
    }
    return table("Choices of every token", columns, shown=0)
