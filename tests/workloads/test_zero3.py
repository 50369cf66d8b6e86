"""ZeRO-3: every unit is gathered for forward, and all but the last again for backward; every unit's gradient is reduced to slices."""

from tests.workloads.recording import check, check_matches, needs_torch, record, run
from tracekit.manifest import decode

pytestmark = needs_torch


def test_units_are_gathered_while_they_work_and_reduced_once(tmp_path):
    recording = record(tmp_path, "zero3", "--verify", "--active", "2")
    check(recording)
    check_matches(recording)
    manifest = recording.manifests[0]
    assert manifest.notes[0].startswith("verified")
    units = len(manifest.units)
    assert recording.counted(0, 2)["all_gather", "dp_shard", "parameter_gather"][0] == 2 * units - 1
    owners = decode((tmp_path / "rank_00000.manifest.json").read_bytes(), "rank 0").owners
    assert {owners.strings[c] for c in owners.category} >= {
        "parameters", "gradients", "gathered_parameters", "unsharded_gradients", "optimizer_state"
    }  # fmt: skip


def test_three_ranks_pad_their_slices_and_every_micro_batch_gathers_and_reduces(tmp_path):
    arguments = ["--mesh", "dp_shard=3", "--micro-batches", "2", "--no-reshard-after-forward", "--no-prefetch", "--active", "1"]
    recording = record(tmp_path, "zero3", "--verify", *arguments)
    check(recording)
    check_matches(recording)
    for manifest in recording.manifests.values():
        padded = sum(unit.padded_elements for unit in manifest.units)
        assert padded > sum(unit.elements for unit in manifest.units)
        assert sum(p.local_shape[0] for p in manifest.parameters) == padded // 3
        assert manifest.optimizer.state_elements == 2 * padded // 3 + len(manifest.units)  # Adam counts the steps of each slice


def test_sixteen_bits_halve_what_is_gathered(tmp_path):
    recording = record(tmp_path, "zero3", "--precision", "fp16", "--reduce-dtype", "bf16", "--layers", "1", "--active", "1")
    check(recording)
    check_matches(recording)


def test_one_rank_of_many_on_the_fake_group(tmp_path):
    recording = record(tmp_path, "zero3", "--backend", "fake", "--mesh", "dp_shard=64", "--rank", "37", "--active", "1")
    check(recording)


def test_a_second_data_parallel_axis_is_refused(tmp_path):
    done = run("record", "zero3", "-o", str(tmp_path), "--mesh", "dp_replicate=2,dp_shard=2", expect=2)
    assert "synchronises gradients along dp_shard only" in done.stderr
