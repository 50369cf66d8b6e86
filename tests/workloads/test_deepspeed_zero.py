"""DeepSpeed's stages: what it sends is what its documentation leads one to expect, and the parameters are those of plain training."""

import importlib.util

import pytest

from tests.workloads.recording import check, check_matches, needs_torch, record, run
from tracekit.manifest import decode

pytestmark = [
    needs_torch,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs the extra deepspeed"),
]


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_three_ranks_with_two_micro_batches(tmp_path, stage):
    sizes = ["--hidden", "36", "--ffn", "50", "--bucket-cap-mb", "0.1"]  # nothing that three ranks could share evenly
    arguments = ["--mesh", "dp_shard=3", "--micro-batches", "2", "--active", "1", "--layers", "2", *sizes]
    recording = record(tmp_path, "deepspeed_zero", "--stage", stage, "--verify", *arguments)
    check(recording)
    check_matches(recording)
    assert recording.manifests[0].notes[0].startswith("verified")


def test_stage_3_holds_a_share_of_every_parameter(tmp_path):
    recording = record(tmp_path, "deepspeed_zero", "--stage", "3", "--precision", "bf16", "--layers", "1", "--active", "1")
    check(recording)
    check_matches(recording)
    manifest = decode((tmp_path / "rank_00000.manifest.json").read_bytes(), "rank 0")
    embedding = next(p for p in manifest.parameters if p.name == "embedding.tokens.weight")
    assert (embedding.shape, embedding.local_shape, embedding.dtype) == ([512, 128], [512 * 128 // 2], "bfloat16")
    assert "gathered_parameters" in {manifest.owners.strings[category] for category in manifest.owners.category}


def test_other_axes_are_refused(tmp_path):
    done = run("record", "deepspeed_zero", "-o", str(tmp_path), "--mesh", "dp_shard=2,tp=2", expect=2)
    assert "give the mesh the axis dp_shard only" in done.stderr
