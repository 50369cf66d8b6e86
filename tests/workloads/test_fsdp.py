"""FSDP1, FSDP2 and HSDP: what is gathered and reduced, to the byte, under every way to shard."""

import pytest

from tests.workloads.recording import check, check_matches, check_model, needs_torch, record, run

pytestmark = needs_torch


@pytest.mark.parametrize(
    ("workload", "options"),
    [
        ("fsdp2", ["--nproc", "3", "--vocabulary", "515", "--layers", "2"]),
        ("fsdp2", ["--no-sync-every-round", "--micro-batches", "2", "--layers", "2"]),
        ("hsdp", ["--layers", "2"]),
        ("fsdp1", ["--nproc", "3", "--vocabulary", "515", "--layers", "2"]),
        ("fsdp1", ["--strategy", "hybrid", "--mesh", "dp_replicate=2,dp_shard=2", "--layers", "2"]),
    ],
)
def test_gathers_and_reductions_are_those_stated_and_the_parameters_those_of_one_process(tmp_path, workload, options):
    recording = record(tmp_path, workload, "--verify", "--active", "2", *options)
    check(recording)
    check_matches(recording)
    assert recording.manifests[0].notes[0].startswith("verified")


@pytest.mark.parametrize(
    ("workload", "options"),
    [
        ("fsdp2", ["--precision", "bf16"]),
        ("fsdp2", ["--reshard-after-forward", "false"]),
        ("fsdp2", ["--reshard-after-forward", "2", "--nproc", "4", "--layers", "1"]),
        ("fsdp1", ["--strategy", "shard_grad_op"]),
        ("fsdp1", ["--precision", "bf16", "--reduce-dtype", "bf16"]),
        ("fsdp2", ["--precision", "fp16"]),
    ],
)
def test_options_change_what_travels(tmp_path, workload, options):
    check(record(tmp_path, workload, "--active", "1", "--layers", "2", *options))


def test_other_units_and_blocks_computed_again(tmp_path):
    """Norm and head are sharded together: one unit, whatever module it is asked for."""
    recording = record(tmp_path, "fsdp2", "--wrap", "ends", "--recompute", "selective", "--verify", "--layers", "1", "--active", "1")
    check(recording)
    check_matches(recording)
    check_model(recording)
    manifest = recording.manifests[0]
    assert manifest.notes[0].startswith("verified")
    assert [unit.name for unit in manifest.units] == ["embedding", "layers.0", "norm, head"]
    assert {p.name: p.unit for p in manifest.parameters}["norm.weight"] == "norm, head"


def test_units_that_are_too_fine(tmp_path):
    """Eight modules of a block and the four around it."""
    recording = record(tmp_path, "fsdp2", "--backend", "fake", "--nproc", "4", "--wrap", "modules", "--layers", "1", "--active", "1")
    check(recording)
    assert recording.counted(0, 2)["reduce_scatter", "dp_shard", "gradient_scatter"][0] == 12


def test_the_fake_backend_plays_one_rank_of_any_mesh(tmp_path):
    recording = record(tmp_path, "fsdp2", "--backend", "fake", "--mesh", "pp=2,dp_shard=4,tp=2", "--rank", "5")
    check(recording)
    groups = {group.axis: list(group.ranks) for group in recording.manifests[5].groups}
    assert groups["tp"] == [4, 5]
    assert groups["dp_shard"] == [1, 3, 5, 7]
    assert groups["pp"] == [5, 13]
    assert "[1, 3, 5, 7]" in recording.output


def test_a_sharded_checkpoint_is_resumed_by_another_number_of_ranks(tmp_path):
    """It is saved within the recorded step too: what ranks tell each other for it is neither parameters nor gradients."""
    folder = str(tmp_path / "checkpoint")
    more = ("--deferred-init", "--checkpoint-every", "1", "--verify")
    first = record(tmp_path / "first", "fsdp2", "--checkpoint", folder, "--layers", "1", "--active", "1", *more)
    check(first)
    check_model(first)
    assert first.counted(0, 2)["gather", "dp_shard", "setup"][0] == 2
    assert first.manifests[0].notes[0].startswith("verified")
    recording = record(tmp_path / "second", "fsdp2", "--checkpoint", folder, "--layers", "1", "--active", "1", "--nproc", "3")
    assert f"resumed from {folder}" in recording.output


def test_axes_that_the_strategy_lacks_are_refused(tmp_path):
    done = run("record", "fsdp1", "-o", str(tmp_path), "--strategy", "hybrid", expect=2)
    assert "hybrid needs dp_replicate and dp_shard" in done.stderr.splitlines()[-1]
