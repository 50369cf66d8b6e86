"""What the experiments say that a rank calls, in order, is what a recording of the same strategy and sizes shows."""

from collections import Counter

import pytest

from tests.workloads.recording import needs_torch, record
from tracekit.simulate import context_parallel, experts, pipeline, tensor_parallel

pytestmark = needs_torch

#: One layer and micro-batch of 4 samples of 16 tokens, hidden size 32, fp32.
LAYER = ("--layers", "1", "--hidden", "32", "--ffn", "64", "--vocabulary", "64", "--heads", "4", "--sequence", "16", "--active", "1")
STAGES = ("--layers", "12", *LAYER[2:])


def recorded(folder, workload, axis, *arguments):
    """(kind, full bytes) of rank 0 on one axis in one step, in order; the sum of replicated weights' gradients left out."""
    operations = (job := record(folder, workload, *arguments).job).operations
    step = operations[operations["launch_step_number"] >= 0]["launch_step_number"].min()
    own = operations[(operations["rank"] == 0) & (operations["launch_step_number"] == step)].sort_values("start_ns")
    return [
        (str(kind), int(full))
        for kind, group, purpose, full in zip(own["kind"], own["group"], own["purpose"], own["full_bytes"], strict=True)
        if group >= 0 and job.groups[group].axis == axis and purpose != "gradient_sync"
    ]


def simulated(done):
    return [(call.kind, call.full_bytes) for call in done.calls]


@pytest.mark.parametrize(
    ("workload", "algorithm"),
    [("allgather", "all_gather"), ("ring", "ring"), ("blockwise", "blockwise"), ("ulysses", "ulysses")],
)
def test_context_parallel(tmp_path, workload, algorithm):
    sizes = context_parallel.Arguments(algorithm=algorithm, cp=2, sequence=16, batch=4, heads=4, kv_heads=2, head_size=8, element_bytes=4)
    wanted = recorded(tmp_path, f"context_parallel_{workload}", "cp", *LAYER, "--kv-heads", "2", "--mesh", "cp=2")
    assert simulated(context_parallel.run(sizes)) == wanted


def test_tensor_parallel(tmp_path):
    sizes = tensor_parallel.Arguments(tp=2, sequence=16, batch=4, hidden=32, heads=4, ffn=64, element_bytes=4)
    assert simulated(tensor_parallel.run(sizes)) == recorded(tmp_path, "tensor_parallel", "tp", *LAYER)


def test_sequence_parallel(tmp_path):
    """The recording gathers in forward what the head needs, and in backward its gradient's way into the layer; both stand at the ends."""
    sizes = tensor_parallel.Arguments(
        tp=2, sequence_parallel=True, keep_gathered=True, sequence=16, batch=4, hidden=32, heads=4, ffn=64, element_bytes=4
    )
    full = 4 * 16 * 32 * 4
    own = [call for call in simulated(tensor_parallel.run(sizes)) if call[1] == full]
    head, embedding = ("all_gather", full), ("all_gather", full)
    found = [call for call in recorded(tmp_path, "sequence_parallel", "tp", *LAYER) if call[1] == full]
    assert found == [*own[:4], head, *own[4:], embedding]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_pipeline(tmp_path, schedule):
    sizes = pipeline.Arguments(schedule=schedule, stages=3, micro_batches=4, sequence=16, hidden=32, element_bytes=4)
    found = recorded(tmp_path, f"pipeline_{schedule}", "pp", *STAGES, "--mesh", "pp=3", "--batch", "4", "--micro-batches", "4")
    assert simulated(pipeline.run(sizes)) == found


def test_interleaved_pipeline(tmp_path):
    """torch posts a receive ahead of the work before it, so that only the numbers of sends and receives are the same."""
    sizes = pipeline.Arguments(schedule="interleaved_1f1b", stages=2, micro_batches=4, sequence=16, hidden=32, element_bytes=4)
    found = recorded(tmp_path, "pipeline_interleaved", "pp", *STAGES, "--mesh", "pp=2", "--batch", "4", "--micro-batches", "4")
    assert Counter(simulated(pipeline.run(sizes))) == Counter(found)


def test_experts(tmp_path):
    """Where tokens go is up to the weights; with padding every exchange has the size that the capacity gives it."""
    sizes = experts.Arguments(ep=2, experts=8, top_k=2, tokens=64, hidden=32, capacity_factor=1.25, pad=True, element_bytes=4)
    options = ("--mesh", "ep=2", "--capacity-factor", "1.25", "--padding")
    assert simulated(experts.run(sizes)) == recorded(tmp_path, "expert_parallel", "ep", *LAYER, *options)


def test_experts_with_uneven_exchanges(tmp_path):
    found = recorded(tmp_path, "expert_parallel", "ep", *LAYER, "--mesh", "ep=2")
    own = simulated(experts.run(experts.Arguments(ep=2, tokens=64, hidden=32, capacity_factor=0.0, element_bytes=4)))
    assert [kind for kind, _ in found] == [kind for kind, _ in own]
    assert found[:2] == own[:2]  # the counts, and all choices of the rank
    assert (found[3], found[4]) == (found[1], found[2])  # backward makes the same journeys
