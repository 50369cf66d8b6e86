"""A long curve for a small picture: few of its points, and never without its peaks and valleys."""

from __future__ import annotations

import numpy as np

from tracekit.trace.events import Int64Array


def downsample(values: Int64Array, buckets: int) -> Int64Array:
    """Ascending positions: of each of ``buckets`` equal runs of points the first, the last, the lowest and the highest.

    So the greatest and the least value of the whole curve, and of each run, are always among them. At most 4 positions a bucket.
    """
    count = len(values)
    if count <= 4 * buckets:
        return np.arange(count, dtype=np.int64)
    edges = np.linspace(0, count, buckets + 1).astype(np.int64)
    size = int((edges[1:] - edges[:-1]).max())
    within = np.minimum(edges[:-1, None] + np.arange(size), edges[1:, None] - 1)
    runs = values[within]
    rows = np.arange(buckets)
    chosen = [edges[:-1], edges[1:] - 1, within[rows, runs.argmin(axis=1)], within[rows, runs.argmax(axis=1)]]
    return np.unique(np.concatenate(chosen)).astype(np.int64)
