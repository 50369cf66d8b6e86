from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracekit.compare.statistics import _EXACT, Verdict, judge, p_greater, spread_of


def by_counting(new, base):
    """Share of all ways to pick the new values among all of which U is as large, without ties."""
    pooled = sorted([*new, *base])
    u = sum(n > b for n in new for b in base)
    ways = list(combinations(pooled, len(new)))
    return sum(sum(n > b for n in way for b in pooled if b not in way) >= u for way in ways) / len(ways)


@given(st.lists(st.integers(0, 1000), min_size=2, max_size=9, unique=True), st.integers(1, 8))
def test_the_p_of_few_values_is_counted_out(values, size):
    new, base = values[: min(size, len(values) - 1)], values[min(size, len(values) - 1) :]
    assert p_greater(np.array(new, float), np.array(base, float)) == pytest.approx(by_counting(new, base))


def test_many_values_use_the_normal_distribution_near_the_exact_one():
    rng = np.random.default_rng(0)
    new, base = rng.normal(0.3, 1, 19), rng.normal(0, 1, 21)
    exact = p_greater(new, base)
    assert 19 * 21 <= _EXACT < 20 * 21
    near = p_greater(np.append(new, np.median(new)), base)
    assert near == pytest.approx(exact, rel=0.25)


def test_spread_ignores_one_step_that_stalls():
    assert spread_of(np.array([1.0, 1.0, 1.0, 9.0])) == 0


def test_drift_is_what_recordings_of_a_side_differ_by():
    new, base = [np.array([1.3, 1.3])], [np.array([1.0, 1.0]), np.array([1.2, 1.2])]
    verdict = judge(new, base, moved=0.0)
    assert verdict.drift == pytest.approx(0.2)
    assert not Verdict(0.001, 0.0, 0.2, apart=False).beyond(0.19)
