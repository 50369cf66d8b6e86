from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tracekit.memory.downsample import downsample


def test_a_short_curve_stays_as_it_is() -> None:
    assert downsample(np.array([3, 1, 2]), 5).tolist() == [0, 1, 2]


def test_of_each_run_the_ends_the_peak_and_the_valley_stay() -> None:
    values = np.array([5, 9, 1, 5, 5, 5, 2, 8, 0, 4])
    assert downsample(values, 2).tolist() == [0, 1, 2, 4, 5, 7, 8, 9]


@given(hnp.arrays(np.int64, st.integers(1, 500), elements=st.integers(0, 1000)), st.integers(1, 20))
def test_no_extreme_is_ever_lost(values, buckets) -> None:
    kept = downsample(values, buckets)
    assert len(kept) <= max(4 * buckets, 4)
    assert (np.diff(kept) > 0).all()
    assert kept[0] == 0
    assert kept[-1] == len(values) - 1
    assert (values[kept].max(), values[kept].min()) == (values.max(), values.min())
    if len(values) > 4 * buckets:
        edges = np.linspace(0, len(values), buckets + 1).astype(int)
        for low, high in pairwise(edges):
            inside = values[kept[(kept >= low) & (kept < high)]]
            assert (inside.max(), inside.min()) == (values[low:high].max(), values[low:high].min())
