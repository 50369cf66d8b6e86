"""Small gathers as fast as large ones: what that wins is what hides nothing."""

from pathlib import Path

import pytest

from tests.builder import Trace, group
from tracekit import analyses
from tracekit.graph.gathers import gain_of_larger
from tracekit.graph.study import Study, study_of
from tracekit.job.load import LoadOptions, load_job


def study(folder: Path, hidden: bool) -> Study:
    """Two ranks: a gather of 1,000 elements in 100 us, then three of 10 in 50 us each, alone or beside a long kernel; then compute."""
    for rank in range(2):
        trace = Trace(rank, 2, groups=[group("0", "default_pg", [0, 1]), group("1", "mesh_dp_shard", [0, 1])])
        trace.step(1, 0, 700)
        trace.kernel("embed", 10, 90, launch=1)
        at = 100
        for number, (elements, length) in enumerate([(1000, 100), (10, 50), (10, 50), (10, 50)]):
            own = {"elements": elements // 2, "out_elements": elements, "seq": number + 1, "launch": 20 + 30 * number}
            own |= {"group": "1", "description": "mesh_dp_shard"}
            trace.collective("_allgather_base", at, length, **own)
            at += length
        if hidden:
            trace.kernel("beside", 100, 300, launch=5)
        trace.kernel("after", 401 if hidden else 351, 200, launch=140)
        trace.write(folder / f"rank{rank}.json")
    found = study_of(load_job([str(folder)], LoadOptions(), analyses.reducers()))
    assert isinstance(found, Study)
    return found


@pytest.mark.parametrize(("hidden", "gain_us"), [(False, 3 * (50 - 1)), (True, 0)])
def test_what_is_not_hidden_is_won(hidden: bool, gain_us: float, tmp_path: Path) -> None:
    assert (gain_of_larger(study(tmp_path, hidden)) or 0.0) / 1000 == pytest.approx(gain_us, abs=1)
