"""A mixture of experts on one rank, forward and backward by hand: the reference of the sharded one.

x (T, h); router R (h, E); expert e is gelu(x W1_e) W2_e with W1 (E, h, f), W2 (E, f, h). With the weights w of the chosen experts

    y_t = sum_j w_tj expert_j(x_t)        dw_tj = dy_t . expert_j(x_t)        each chosen expert gets w_tj dy_t
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tracekit.simulate.experts.routing import Routing, router_backward
from tracekit.simulate.functions import Float, gelu, gelu_backward


@dataclass(frozen=True)
class Weights:
    """Router (h, E), first (E, h, f) and second (E, f, h) matrices of the experts."""

    router: Float
    first: Float
    second: Float


class ExpertsResult(NamedTuple):
    """Output and gradients, whole."""

    y: Float
    dx: Float
    drouter: Float
    dfirst: Float
    dsecond: Float


class SavedExpert(NamedTuple):
    """What an expert's backward needs."""

    x: Float
    z: Float


def expert_forward(first: Float, second: Float, x: Float) -> tuple[Float, SavedExpert]:
    """One expert on its tokens (n, h)."""
    z = x @ first
    return gelu(z) @ second, SavedExpert(x, z)


def expert_backward(first: Float, second: Float, saved: SavedExpert, dy: Float) -> tuple[Float, Float, Float]:
    """(dx, gradient of the first, of the second matrix)."""
    dz = gelu_backward(saved.z, dy @ second.T)
    return dz @ first.T, saved.x.T @ dz, gelu(saved.z).T @ dy


def one_rank(weights: Weights, routing: Routing, x: Float, dy: Float) -> ExpertsResult:
    """All tokens and all experts on one rank; choices that ``routing`` does not keep count nothing."""
    y, dx, dweights = np.zeros_like(x), np.zeros_like(x), np.zeros_like(routing.weights)
    dfirst, dsecond = np.zeros_like(weights.first), np.zeros_like(weights.second)
    for expert, (first, second) in enumerate(zip(weights.first, weights.second, strict=True)):
        tokens, slots = np.nonzero((routing.experts == expert) & routing.kept)
        out, saved = expert_forward(first, second, x[tokens])
        share = routing.weights[tokens, slots][:, None]
        y[tokens] += share * out  # a token chooses an expert at most once
        dweights[tokens, slots] = (dy[tokens] * out).sum(axis=1)
        dtokens, dfirst[expert], dsecond[expert] = expert_backward(first, second, saved, share * dy[tokens])
        dx[tokens] += dtokens
    dlogits = router_backward(routing, dweights)
    return ExpertsResult(y, dx + dlogits @ weights.router.T, x.T @ dlogits, dfirst, dsecond)
