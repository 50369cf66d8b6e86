"""What sample_traces do not show, recorded now: with padding every exchange of experts has the size that the capacity gives it."""

from tests.workloads.recording import needs_torch, record
from tracekit.simulate import experts

pytestmark = needs_torch

#: One layer and micro-batch of 4 samples of 16 tokens, hidden size 32, fp32.
LAYER = ("--layers", "1", "--hidden", "32", "--ffn", "64", "--vocabulary", "64", "--heads", "4", "--sequence", "16", "--active", "1")


def test_experts_with_padding(tmp_path):
    sizes = experts.Arguments(ep=2, experts=8, top_k=2, tokens=64, hidden=32, capacity_factor=1.25, pad=True, element_bytes=4)
    options = ("--mesh", "ep=2", "--capacity-factor", "1.25", "--padding")
    job = record(tmp_path, "expert_parallel", *LAYER, *options).job
    frame = job.operations
    step = frame[frame["launch_step_number"] >= 0]["launch_step_number"].min()
    own = frame[(frame["rank"] == 0) & (frame["launch_step_number"] == step) & (frame["purpose"] != "gradient_sync")]
    found = own.sort_values("start_ns")
    columns = (found[name] for name in ("kind", "purpose", "full_bytes"))
    calls = [(str(kind), str(purpose), int(full)) for kind, purpose, full in zip(*columns, strict=True)]
    assert [(call.kind, call.purpose, call.full_bytes) for call in experts.run(sizes).calls] == calls
