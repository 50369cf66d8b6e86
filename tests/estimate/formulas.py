"""Closed forms as papers print them, to hold the model's own counts to."""

from __future__ import annotations

from fractions import Fraction

from tracekit.estimate.recipe import Recipe


def palm_flops_a_token(n: float, layers: int, heads: int, head_dim: int, sequence: int) -> float:
    """6N + 12 L H Q s (PaLM, arXiv:2204.02311, appendix B): forward and backward of every parameter and of attention."""
    return 6 * n + 12 * layers * heads * head_dim * sequence


def gpt_iteration_flops(batch: int, sequence: int, layers: int, hidden: int, vocabulary: int, recompute: bool = False) -> float:
    """FLOP of one iteration of a GPT (PTD-P, arXiv:2104.04473, appendix; arXiv:2205.05198, appendix A).

    72 B s L h^2 (1 + s/(6h) + V/(12 L h)); with full recomputation the layers run forward twice: 96 B s L h^2 (1 + s/(6h) + V/(16 L h)).
    """
    factor, head = (96, 16) if recompute else (72, 12)
    return factor * batch * sequence * layers * hidden**2 * (1 + sequence / (6 * hidden) + vocabulary / (head * layers * hidden))


def training_seconds(tokens: float, parameters: float, gpus: int, flops_a_gpu: float) -> float:
    """8 T P / (n X): time of a whole training with full recomputation (arXiv:2104.04473, section 5.1, equation 4) [s]."""
    return 8 * tokens * parameters / (gpus * flops_a_gpu)


def gpt_parameters(layers: int, hidden: int, vocabulary: int, sequence: int) -> float:
    """12 L h^2 (1 + 13/(12h) + (V + s)/(12 L h)) (arXiv:2104.04473, section 5.1, equation 2); the last norm, 2h, is left out there."""
    return 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (vocabulary + sequence) / (12 * layers * hidden))


def bytes_a_parameter(chosen: Recipe, strategy: str, w: int) -> Fraction:
    """Bytes a parameter of model state on each of ``w`` data-parallel ranks (ZeRO, arXiv:1910.02054, section 5; figure 1), unpadded."""
    p, g, o = Fraction(chosen.parameter), Fraction(chosen.gradients), Fraction(chosen.optimizer_state)
    shares = {"none": p + g + o, "ddp": p + g + o, "zero1": p + g + o / w, "zero2": p + (g + o) / w}
    return shares.get(strategy, (p + g + o) / w)
