"""Which tokens go to which experts: router, top-k, capacity, and the order in which a rank sends them.

Symbols: T tokens of a rank, E experts, k experts a token. Sources: GShard, arXiv:2006.16668; Switch Transformer, arXiv:2101.03961.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from tracekit.simulate.functions import Float, softmax, softmax_backward

Indices = npt.NDArray[np.int64]
#: Who is dropped where an expert is full: what comes last in the rank's tokens, or what the router wants least.
DROPS = ("position", "probability")


@dataclass(frozen=True)
class Routing:
    """One rank's choice. ``probabilities`` (T, E); ``experts``, ``weights`` and ``kept`` (T, k), a token's first choice first.

    ``normalised``: the weights of a token's k experts are made to add up to 1 (before any is dropped).
    """

    probabilities: Float
    experts: Indices
    weights: Float
    kept: npt.NDArray[np.bool_]
    normalised: bool


def route(logits: Float, k: int, normalised: bool) -> Routing:
    """Each token's k most probable experts (of equal ones the first), all kept."""
    probabilities = softmax(logits)
    experts = np.argsort(-probabilities, axis=1, kind="stable")[:, :k].astype(np.int64)
    weights = np.take_along_axis(probabilities, experts, axis=1)
    if normalised:
        weights = weights / weights.sum(axis=1, keepdims=True)
    return Routing(probabilities, experts, weights, np.ones(experts.shape, np.bool_), normalised)


def router_backward(routing: Routing, dweights: Float) -> Float:
    """Gradient of the logits (T, E) from that of the weights (T, k); a choice that was dropped has gradient 0."""
    chosen = dweights
    if routing.normalised:
        total = np.take_along_axis(routing.probabilities, routing.experts, axis=1).sum(axis=1, keepdims=True)
        chosen = (dweights - (dweights * routing.weights).sum(axis=1, keepdims=True)) / total
    gradient = np.zeros_like(routing.probabilities)
    np.put_along_axis(gradient, routing.experts, chosen, axis=1)
    return softmax_backward(routing.probabilities, gradient)


def capacity_of(factor: Fraction, tokens: int, k: int, experts: int) -> int:
    """Most tokens that one rank sends to one expert: factor k T / E, rounded up."""
    return math.ceil(factor * k * tokens / experts)


def drop(routing: Routing, capacity: int, policy: str) -> Routing:
    """Keep ``capacity`` tokens for each expert. First choices go before second ones under ``position``, then tokens in order."""
    _, k = routing.experts.shape
    flat = routing.experts.T.reshape(-1)  # all first choices, then all second ones, ...
    urgency = -routing.weights.T.reshape(-1) if policy == "probability" else np.zeros(flat.size)
    by_expert = np.lexsort((np.arange(flat.size), urgency, flat))
    kept = np.zeros(flat.size, np.bool_)
    kept[by_expert] = _place_in_run(flat[by_expert]) < capacity
    return Routing(routing.probabilities, routing.experts, routing.weights, kept.reshape(k, -1).T.copy(), routing.normalised)


@dataclass(frozen=True)
class SendingOrder:
    """What one rank sends, in sending order: by expert, then by token. One entry a kept choice.

    ``rows`` are their places in the buffer, which has ``sizes[e]`` rows for expert e: as many as there are tokens, or the capacity, the
    rest of it padding. ``counts[e]`` are the tokens alone.
    """

    tokens: Indices
    slots: Indices
    rows: Indices
    counts: Indices
    sizes: Indices


def sending_order(routing: Routing, pad_to: int | None) -> SendingOrder:
    """The order of sending; ``pad_to``: rows of every expert in the buffer, None for no padding."""
    tokens, slots = np.nonzero(routing.kept)
    experts = routing.experts[tokens, slots]
    order = np.argsort(experts, kind="stable")
    tokens, slots, experts = tokens[order], slots[order], experts[order]
    counts = np.bincount(experts, minlength=routing.probabilities.shape[1]).astype(np.int64)
    sizes = counts if pad_to is None else np.full(len(counts), pad_to, np.int64)
    starts = np.cumsum(sizes) - sizes
    return SendingOrder(tokens.astype(np.int64), slots.astype(np.int64), starts[experts] + _place_in_run(experts), counts, sizes)


def balance_loss(routings: Sequence[Routing]) -> float:
    """Auxiliary loss E sum_e f_e P_e, f the share of choices and P the mean probability of an expert: 1 in balance (arXiv:2101.03961)."""
    chosen = np.concatenate([routing.experts.reshape(-1) for routing in routings])
    probabilities = np.concatenate([routing.probabilities for routing in routings])
    share = np.bincount(chosen, minlength=probabilities.shape[1]) / chosen.size
    return float(probabilities.shape[1] * (share * probabilities.mean(axis=0)).sum())


def _place_in_run(ordered: Indices) -> Indices:
    """0, 1, 2, ... within each run of equal values of an ordered array."""
    places = np.arange(len(ordered), dtype=np.int64)
    begins = np.concatenate([[True], ordered[1:] != ordered[:-1]]) if len(ordered) else np.zeros(0, np.bool_)
    return places - np.maximum.accumulate(np.where(begins, places, 0)) if len(ordered) else places
