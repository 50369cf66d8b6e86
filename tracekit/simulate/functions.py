"""The functions of a transformer that are not linear, with their derivatives by hand."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Float = npt.NDArray[np.float64]

_ROOT = float(np.sqrt(2 / np.pi))
_CUBE = 0.044715


def linear(x: Float, weight: Float) -> Float:
    """x W over the last dimension, all tokens in one product: NumPy would multiply once for every leading index."""
    return np.asarray((x.reshape(-1, x.shape[-1]) @ weight).reshape(*x.shape[:-1], weight.shape[1]), np.float64)


def gelu(x: Float) -> Float:
    """GELU in its tanh form, element by element (arXiv:1606.08415, section 2)."""
    return np.asarray(0.5 * x * (1 + np.tanh(_ROOT * (x + _CUBE * x * x * x))), np.float64)


def gelu_backward(x: Float, gradient: Float) -> Float:
    """Gradient of what went into ``gelu`` from that of what came out; all of one shape."""
    inner = np.tanh(_ROOT * (x + _CUBE * x * x * x))
    slope = 0.5 * (1 + inner) + 0.5 * x * (1 - inner**2) * _ROOT * (1 + 3 * _CUBE * x * x)
    return np.asarray(gradient * slope, np.float64)


def softmax(scores: Float) -> Float:
    """Softmax over the last dimension. A row of -inf alone has no softmax and gives NaN: callers never build one."""
    shifted = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=-1, keepdims=True), np.float64)


def softmax_backward(probabilities: Float, gradient: Float) -> Float:
    """Gradient of the scores from that of the probabilities: p (g - sum(p g)) over the last dimension."""
    return np.asarray(probabilities * (gradient - (probabilities * gradient).sum(axis=-1, keepdims=True)), np.float64)


def error(found: Float, wanted: Float) -> float:
    """Largest absolute difference; 0 for empty arrays. Raises ``ValueError`` where the shapes differ, so that nothing is broadcast."""
    if found.shape != wanted.shape:
        raise ValueError(f"shapes {found.shape} and {wanted.shape} are not the same")
    return float(np.max(np.abs(found - wanted), initial=0.0))


def rounding(terms: int, *arrays: Float) -> float:
    """What float64 rounding may add up to in a sum of ``terms`` products of numbers as large as those in ``arrays``.

    8 sqrt(terms) eps times the product of the arrays' largest magnitudes (at least 1 each): errors of single operations are as good as
    random (Higham, Accuracy and Stability of Numerical Algorithms, section 2.8), and 8 leaves room for the functions in between.
    """
    largest = math.prod(max(1.0, float(np.max(np.abs(array), initial=0.0))) for array in arrays)
    return 8 * math.sqrt(max(1, terms)) * float(np.finfo(np.float64).eps) * largest
