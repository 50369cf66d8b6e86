"""Accelerate drives DDP and FSDP2: the collectives are those of torch, the parameters those of plain training."""

import importlib.util

import pytest

from tests.workloads.recording import check, check_matches, needs_torch, record, run
from tracekit.manifest import decode

pytestmark = [
    needs_torch,
    pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs the extra accelerate"),
]


def test_ddp_reduces_every_bucket_in_the_last_micro_batch(tmp_path):
    recording = record(tmp_path, "accelerate_ddp", "--verify", "--micro-batches", "2", "--active", "1")
    check(recording)
    check_matches(recording)
    assert recording.manifests[0].notes[0].startswith("verified")


def test_the_optimizer_inside_of_accelerates_own_is_recorded(tmp_path):
    record(tmp_path, "accelerate_ddp", "--active", "1", "--layers", "1")
    manifest = decode((tmp_path / "rank_00000.manifest.json").read_bytes(), "rank 0")
    assert manifest.optimizer.kind == "Adam"
    assert manifest.optimizer.state_elements == 2 * manifest.model["parameters"] + len(manifest.parameters)
    assert "optimizer_state" in {manifest.owners.strings[category] for category in manifest.owners.category}


def test_fsdp2_gathers_and_reduces_units_as_accelerate_cuts_them(tmp_path):
    recording = record(
        tmp_path, "accelerate_fsdp2", "--verify", "--mesh", "dp_shard=3", "--micro-batches", "2", "--active", "1", "--batch", "2"
    )
    check(recording)
    check_matches(recording)
    units = {unit.name: unit.reshard_after_forward for unit in recording.manifests[0].units}
    assert units == {"": False, "norm": False} | {f"layers.{i}": True for i in range(4)}


def test_fsdp2_in_bf16_halves_what_travels(tmp_path):
    arguments = ["--precision", "bf16", "--no-reshard-after-forward", "--layers", "1", "--active", "1"]
    recording = record(tmp_path, "accelerate_fsdp2", *arguments)
    check(recording)
    check_matches(recording)


def test_ranks_along_other_axes_are_refused(tmp_path):
    done = run("record", "accelerate_ddp", "-o", str(tmp_path), "--mesh", "dp_replicate=2,tp=2", expect=2)
    assert "give the mesh the axis dp_replicate only" in done.stderr
