"""A real production job of 8 ranks whose what-if figures are published; skipped where its folder is absent."""

import json

import pytest

from tests.real import REAL
from tracekit.graph.local import reduce_window
from tracekit.graph.study import ANALYSIS, study_of
from tracekit.job.load import LoadOptions, load_job

FOLDER = REAL / "bytedance_ST"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="no folder of real traces beside the project")
#: What the study calls each kind of work.
NAMES = {
    "forward": "forward-compute",
    "backward": "backward-compute",
    "forward_messages": "forward-pp-comm",
    "backward_messages": "backward-pp-comm",
    "all_gather:dp": "params-all-gather",
    "reduce_scatter:dp": "grads-reduce-scatter",
    "all_reduce:embedding": "embedding-grads-all-reduce",
    "all_reduce:world": "optimizer-clip-main-grad",
    "optimizer": "optimizer",
}


@pytest.mark.parametrize("traces", ["traces", "traces_sync_events"])
def test_the_published_figures_follow_from_the_traces(traces):
    truth = json.loads((FOLDER / "truth.json").read_text())
    study = study_of(load_job([str(FOLDER / traces)], LoadOptions(), {ANALYSIS: reduce_window}))
    assert study.graph.synced == (traces == "traces_sync_events")
    assert study.error == 0
    by_kind, by_role = study.slowdowns
    assert by_kind.slowdown == pytest.approx(truth["S"], rel=1e-5)
    assert by_kind.replayed_ns / 1e9 == pytest.approx(truth["M_S_detail"]["tori"], rel=1e-5)
    assert by_kind.error == pytest.approx(truth["launch_slowdown"] - 1, abs=1e-3)
    assert by_kind.worst_ranks == truth["worst_workers"]
    assert by_kind.worst_ranks_share == pytest.approx(truth["M_W"], rel=1e-3)
    assert by_kind.last_stage_share == pytest.approx(truth["M_S"], rel=1e-4)
    assert by_kind.by_stage == pytest.approx({int(s): value for s, value in truth["S_stage"].items()}, rel=1e-5)
    assert by_kind.by_rank == pytest.approx({int(r): value for r, value in truth["S_w"].items()}, rel=1e-5)
    for own, theirs in NAMES.items():
        assert by_kind.by_kind[own] == pytest.approx(truth["S_t"][theirs], rel=1e-5)
    of_stages = truth["variants_not_published"]["same_stage"]
    assert by_role.slowdown == pytest.approx(of_stages["S"], rel=1e-4)
    assert by_role.last_stage_share == pytest.approx(of_stages["last_stage_removed_share"], abs=1e-4)
