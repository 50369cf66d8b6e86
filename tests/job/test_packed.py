"""Results of windows as packed bytes: the same when they are asked for, and no class from outside."""

from __future__ import annotations

import fractions
import pickle
import zlib

import numpy as np
import pytest

from tests.job.test_load import write
from tracekit import analyses
from tracekit.job import load, packed
from tracekit.job.options import LoadOptions
from tracekit.job.packed import LEAST_BYTES, Packed, unpacked
from tracekit.report.document import document


def test_large_results_are_packed_and_come_back():
    large = np.arange(LEAST_BYTES)
    kept = packed.packed({"large": large, "small": 3, "none": None})
    assert isinstance(kept["large"], Packed) and len(kept["large"].body) < large.nbytes
    assert (kept["small"], kept["none"]) == (3, None)
    np.testing.assert_array_equal(unpacked(kept["large"]), large)


def test_a_packed_result_can_be_of_no_class_from_outside():
    body = zlib.compress(pickle.dumps([fractions.Fraction(1, 3)] * 9))
    with pytest.raises(pickle.UnpicklingError, match="no part of a window"):
        Packed(body).unpacked()


def test_a_job_of_many_files_says_the_same(tmp_path, monkeypatch):
    for rank in range(4):
        write(tmp_path, rank, world=4, shift=10 * rank)

    def told():
        job = load.load_job([str(tmp_path)], LoadOptions(), analyses.reducers())
        kept = [result for window in job.windows for result in window.reduced.values()]
        return document(job, analyses.run(job)), any(isinstance(result, Packed) for result in kept)

    plain = told()
    monkeypatch.setattr(load, "PACKED_FROM", 1)
    monkeypatch.setattr(packed, "LEAST_BYTES", 1)
    assert (told(), plain[1]) == ((plain[0], True), False)
