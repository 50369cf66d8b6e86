"""Floating-point operations of training, and what share of the hardware's peak they are.

Symbols: N parameters, L layers, H heads, Q head size, h hidden, s sequence, B sequences, V vocabulary. One multiplication with its addition
counts as 2 FLOP.
"""

from __future__ import annotations

from collections.abc import Iterable

from tracekit.estimate.parameters import Parameter
from tracekit.estimate.saved import computed_again
from tracekit.estimate.shape import ModelShape


def utilization(flops: float, seconds: float, devices: int, peak: float) -> float | None:
    """FLOP / (time * devices * peak): MFU for the model's own FLOP, HFU for all that ran (recomputation too). None without time."""
    return flops / (seconds * devices * peak) if seconds > 0 else None


def matrix_elements(shape: ModelShape, parameters: Iterable[Parameter]) -> float:
    """Elements of the matrices that a token is multiplied with: of stacked experts top_k of them; no norms, biases and lookups.

    A head tied to the embedding is a matrix all the same.
    """
    total = 0.0
    for parameter in parameters:
        if len(parameter.shape) < 2 or parameter.role in ("embedding", "norm"):
            continue
        total += parameter.elements * shape.top_k / parameter.experts if parameter.experts else parameter.elements
    return total + (shape.vocabulary * shape.hidden if shape.tied_embeddings else 0)


def attention_flops_a_token(shape: ModelShape, causal: bool, context: int | None = None) -> float:
    """Forward FLOP a token and layer of scores and their product with the values: 2 s (query + value width); causal: half of it."""
    each = 2 * (context or shape.sequence) * (shape.query_width + shape.attention_width)
    return each / 2 if causal else each


def forward_flops_a_token(shape: ModelShape, parameters: Iterable[Parameter], causal: bool) -> float:
    """Forward FLOP of one token: 2 for each element of a matrix it meets, and attention."""
    return 2 * matrix_elements(shape, parameters) + shape.layers * attention_flops_a_token(shape, causal)


def step_flops(shape: ModelShape, parameters: Iterable[Parameter], tokens: int, causal: bool) -> float:
    """Model FLOP of a step of ``tokens`` tokens: forward, and twice that backward."""
    return 3 * tokens * forward_flops_a_token(shape, parameters, causal)


def recomputed_flops(shape: ModelShape, parameters: Iterable[Parameter], tokens: int, causal: bool, recompute: str) -> float:
    """FLOP that run a second time: full: the layers' forward; selective: attention's core, or torchtitan's half of the products; none."""
    attention = shape.layers * attention_flops_a_token(shape, causal)
    if recompute in ("selective", "selective-megatron"):
        return tokens * attention
    if recompute in ("full", "selective-torchtitan"):
        inside = matrix_elements(shape, [p for p in parameters if p.layer is not None])
        inside -= shape.vocabulary * shape.hidden if shape.tied_embeddings else 0
        return tokens * (2 * inside + attention if recompute == "full" else 2 * inside * computed_again(shape))
    return 0.0
