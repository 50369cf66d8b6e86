"""Sentences beside an estimate: what another framework's habit, or another option, would change."""

from __future__ import annotations

from typing import Any

from tracekit.estimate.estimate import Estimate, estimate
from tracekit.estimate.notes import notes
from tracekit.estimate.spec import spec_of


def estimated(**values: Any) -> Estimate:
    spec = spec_of({"model": "llama3-8b", "batch": {"micro_batches": 32, "recompute": "full"}, **values})
    return estimate(spec.shape, spec.plan, spec.hardware)


def test_a_habit_that_decides_a_figure_is_named_with_both_figures() -> None:
    result = estimated(mesh="pp=8", strategy="none", recipe="bf16")
    found = [note for note in notes(result) if note.startswith("receive_buffers true is how torch works; as megatron has it (false)")]
    assert len(found) == 1 and "the peak would be" in found[0]
    spec = {"mesh": "pp=8", "strategy": "none", "recipe": "bf16", "implementation": {"name": "torch", "receive_buffers": False}}
    assert estimated(**spec).peak.peak_bytes < 0.95 * result.peak.peak_bytes


def test_what_makes_no_difference_is_not_said() -> None:
    assert not any("receive_buffers" in note for note in notes(estimated(mesh="dp_shard=8")))


def test_sequence_parallelism_attention_and_fp8() -> None:
    found = notes(estimated(mesh="dp_shard=8,tp=8"))
    assert any("with sequence_parallel the peak would be" in note for note in found)
    assert any(note.startswith("attention's scores are 22% of the model's FLOP; a causal mask needs half") for note in found)
    causal = estimated(mesh="dp_shard=8", batch={"micro_batches": 32, "recompute": "full", "causal": True})
    assert any("half of them counted as the mask is causal" in note for note in notes(causal))
    assert any(note.startswith("fp8 is for matrix products") for note in notes(estimated(mesh="dp_shard=8", recipe="fp8_lm")))


def test_deepspeed_says_what_its_own_estimator_says() -> None:
    """2 N + 18 N / W bytes of stage 2: N = 8.03 billion, W = 8."""
    (said,) = [note for note in notes(estimated(mesh="dp_shard=8", strategy="zero2", implementation="deepspeed")) if "DeepSpeed" in note]
    assert "stage 2 says 34.1 GB a GPU" in said
