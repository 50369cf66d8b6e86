"""Adam, element by element, so that a shard of the state updates a shard of the parameter exactly as the whole would.

    m = b1 m + (1-b1) g,  v = b2 v + (1-b2) g^2,  p -= lr * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

Source: Kingma and Ba, 2015, arXiv:1412.6980, algorithm 1; defaults as in ``torch.optim.Adam``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekit.simulate.shard_layout import Array


@dataclass(frozen=True)
class Adam:
    """The constants of the update; ``learning_rate`` is the step size."""

    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    def update(self, parameter: Array, gradient: Array, first: Array, second: Array, step: int) -> None:
        """One step in place on equally long arrays; ``first``, ``second`` are the moments, ``step`` counts from 1."""
        first *= self.beta1
        first += (1 - self.beta1) * gradient
        second *= self.beta2
        second += (1 - self.beta2) * gradient**2
        scale = np.sqrt(second / (1 - self.beta2**step)) + self.epsilon
        parameter -= self.learning_rate * (first / (1 - self.beta1**step)) / scale
