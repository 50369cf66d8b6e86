"""Several strategies on one mesh: every axis shows its own collectives."""

import pytest

from tests.workloads.recording import check, check_matches, check_model, needs_torch, record, run

pytestmark = needs_torch


def test_three_axes_on_eight_ranks(tmp_path):
    recording = record(tmp_path, "hybrid_3d", "--verify", "--active", "1", "--layers", "2")
    check(recording)
    check_matches(recording)
    assert all(manifest.notes[0].startswith("verified") for manifest in recording.manifests.values())


def test_experts_beside_pipeline_and_sharding(tmp_path):
    mesh = "pp=2,ep=2,dp_shard=2,cp=1,tp=1"
    recording = record(tmp_path, "hybrid_5d", "--mesh", mesh, "--verify", "--active", "1", "--layers", "2")
    check(recording)
    check_matches(recording)
    assert all(manifest.notes[0].startswith("verified") for manifest in recording.manifests.values())


@pytest.mark.slow
def test_four_axes_on_sixteen_ranks(tmp_path):
    recording = record(tmp_path, "hybrid_4d", "--verify", "--active", "1")
    check(recording)
    check_matches(recording)


@pytest.mark.many_processes
def test_five_axes_on_thirty_two_ranks(tmp_path):
    """Every axis is larger than one, every rank a process."""
    sizes = ("--layers", "2", "--hidden", "32", "--ffn", "64", "--vocabulary", "64", "--sequence", "16", "--active", "1")
    recording = record(tmp_path, "hybrid_5d", "--verify", *sizes)
    assert set(recording.manifests) == set(range(32))
    check(recording)
    check_matches(recording)
    check_model(recording)
    assert all(manifest.notes[0].startswith("verified") for manifest in recording.manifests.values())


@pytest.mark.parametrize(
    ("workload", "mesh", "rank", "groups"),
    [
        ("hybrid_4d", "pp=2,dp_replicate=2,dp_shard=2,cp=2,tp=2", 19, {"dp_replicate": [19, 27], "dp_shard_cp": [17, 19, 21, 23]}),
        ("hybrid_5d", "pp=2,ep=2,dp_shard=4,cp=2,tp=2", 45, {"pp": [13, 45], "ep": [45, 61], "dp_shard": [33, 37, 41, 45]}),
    ],
)
def test_one_rank_of_a_larger_mesh_alone(tmp_path, workload, mesh, rank, groups):
    recording = record(tmp_path, workload, "--backend", "fake", "--mesh", mesh, "--rank", str(rank), "--active", "1", "--layers", "2")
    check(recording)
    found = {group.axis: list(group.ranks) for group in recording.manifests[rank].groups}
    assert {axis: found[axis] for axis in groups} == groups


def test_axes_in_an_order_in_which_groups_cross_are_refused(tmp_path):
    done = run("record", "hybrid_3d", "--mesh", "tp=2,dp_shard=2,pp=2", "-o", str(tmp_path), expect=2)
    assert "write them as pp" in done.stderr
