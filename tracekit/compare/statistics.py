"""Is a change larger than the runs' own noise? A rank test (Mann and Whitney 1947), one-sided, and the drift between recordings.

What is compared are values relative to the base's median at the same place, so that ranks with unequal work can be taken together:

- four recordings a side or more: one value a recording (its median). Recordings are independent, so the test's p holds as it stands.
- fewer: one value a rank and step. Steps of one recording share its machine, its neighbours, its clocks; a test over them knows nothing of
  how much two recordings of the same program differ. So the change also has to exceed the *drift*: with two or three recordings of a side
  what they differ by among themselves; with one, what the run's other times moved by, at most DRIFT times its own spread over steps.
  Where the values of one recording spread by more than TOO_NOISY, it cannot tell its machine from a change: more recordings can.

A change counts when p <= ALPHA and it exceeds the drift. Of so few values that no p can be that small, the two sides must be apart by more
than either spreads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import comb, erfc, sqrt

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]

ALPHA = 0.01
#: How far two recordings may drift apart, in spreads (median absolute deviation times 1.4826) of their own steps.
DRIFT = 4.0
#: Spread (of the values, or of the steps) above which one recording a side says nothing about times.
TOO_NOISY = 0.10
#: Recordings of a side from which on they are what is compared.
ENOUGH_RUNS = 4
#: Sizes up to which the distribution of U is counted out.
_EXACT = 400


@dataclass(frozen=True)
class Verdict:
    """``p`` that NEW is not above BASE (and below, for a decrease), the ``spread`` of values, the ``drift`` a change must exceed."""

    p: float
    spread: float
    drift: float
    apart: bool  # every NEW value lies on one side of every BASE value, by more than either spreads
    too_noisy: bool = False

    def beyond(self, relative: float) -> bool:
        """Whether a relative change is more than noise."""
        return not self.too_noisy and (self.p <= ALPHA or self.apart) and abs(relative) > self.drift


def p_greater(new: Values, base: Values) -> float:
    """One-sided p of Mann and Whitney's U: as large a U by chance, if both came from one distribution. Ties count half."""
    n, m = len(new), len(base)
    if not n or not m:
        return 1.0
    below = np.searchsorted(np.sort(base), new, side="left")
    ties = np.searchsorted(np.sort(base), new, side="right") - below
    u = float(below.sum() + ties.sum() / 2)
    if n * m <= _EXACT:
        counts = _ways(n, m)
        return sum(counts[int(np.ceil(u)) :]) / comb(n + m, n)
    pooled = np.unique(np.concatenate([new, base]), return_counts=True)[1]
    size = n + m
    variance = n * m / 12 * (size + 1 - float((pooled**3 - pooled).sum()) / (size * (size - 1)))
    return 1.0 if variance <= 0 else 0.5 * erfc((u - n * m / 2 - 0.5) / sqrt(2 * variance))


@cache
def _ways(n: int, m: int) -> tuple[int, ...]:
    """How many of the arrangements of n and m values have U = 0, 1, ..., n m: the coefficients of the Gaussian binomial."""
    counts = [1] + [0] * (n * m)
    for i in range(1, n + 1):
        for u in range(n * m, m + i - 1, -1):
            counts[u] -= counts[u - m - i]
        for u in range(i, n * m + 1):
            counts[u] += counts[u - i]
    return tuple(counts)


def spread_of(values: Values) -> float:
    """Median absolute deviation, as the standard deviation of a normal distribution; the range of two values or one."""
    if len(values) < 3:
        return float(np.ptp(values)) if len(values) else 0.0
    return float(1.4826 * np.median(np.abs(values - np.median(values))))


def judge(new: list[Values], base: list[Values], moved: float, steps_spread: float = 0.0) -> Verdict:
    """``new`` and ``base``: relative values of each recording.

    ``moved``: what the run's other times moved by between the sides; ``steps_spread``: the spread of its steps.
    """
    runs = min(len(new), len(base))
    noisy = False
    within = max((spread_of(values) for values in (*new, *base)), default=0.0)
    if runs >= ENOUGH_RUNS:
        units = [np.array([float(np.median(values)) for values in side]) for side in (new, base)]
        drift = 0.0
    else:
        units = [np.concatenate(side) for side in (new, base)]
        own = _apart(new, base)
        noisy = own is None and max(within, steps_spread) > TOO_NOISY
        drift = own if own is not None else min(moved, DRIFT * within)
    up, down = p_greater(units[0], units[1]), p_greater(units[1], units[0])
    return Verdict(min(up, down), within, drift, _separate(*units), noisy)


def _apart(*sides: list[Values]) -> float | None:
    """The largest difference between recordings of one side; None where each side has one."""
    medians = [[float(np.median(values)) for values in side] for side in sides]
    ranges = [max(side) - min(side) for side in medians if len(side) > 1]
    return max(ranges) if ranges else None


def _separate(new: Values, base: Values) -> bool:
    """For few values: the sides do not touch, and the gap is wider than either range."""
    if not len(new) or not len(base) or comb(len(new) + len(base), len(new)) >= 1 / ALPHA:
        return False
    gap = max(float(new.min() - base.max()), float(base.min() - new.max()))
    return gap > 0 and gap > max(float(np.ptp(new)), float(np.ptp(base)))
