"""torch's own analyzer of flight recorder dumps agrees where it gives an answer."""

import argparse
import pickle

import pytest

from tests.analyses.hang.made import STARTED, RankDump, hang_of

builder = pytest.importorskip("torch.distributed.flight_recorder.components.builder")


def told_by_torch(folder):
    """The first collective that torch's analyzer finds wrong."""
    details = {}
    for path in sorted(folder.glob("nccl_trace_rank_*")):
        root = pickle.loads(path.read_bytes())
        details[path.name] = {"host_name": "h", "rank": int(path.name[-1]), **{k: root[k] for k in ("entries", "version", "pg_config")}}
    options = argparse.Namespace(verbose=False, just_print_entries=False, allow_incomplete_ranks=True, mismatch_cap=10)
    found = builder.build_db(details, options, "2.10").collectives
    return next(collective for collective in found if collective.missing_ranks or not collective.pass_check)


def test_missing_ranks(tmp_path):
    dumps = {rank: RankDump().call().call(state=STARTED) for rank in (0, 1, 3)} | {2: RankDump().call()}
    hang = hang_of(tmp_path, dumps)
    theirs = told_by_torch(tmp_path)
    assert (theirs.collective_seq_id, theirs.missing_ranks) == (2, {2})
    assert (hang.waits[0].call.seq, set(hang.waits[0].missing)) == (2, {2})


@pytest.mark.parametrize("other", [{"kind": "all_gather"}, {"size": 65}])
def test_mismatches(other, tmp_path):
    dumps = {rank: RankDump().call().call(state=STARTED) for rank in (0, 1, 2)} | {3: RankDump().call().call(**{"state": STARTED, **other})}
    hang = hang_of(tmp_path, dumps)
    theirs = told_by_torch(tmp_path)
    assert (theirs.collective_seq_id, set(theirs.mismatch_collectives)) == (2, {3})
    assert hang.root is not None
    assert (hang.root.why, hang.root.ranks, hang.waits[0].call.seq) == ("mismatch", [3], 2)
