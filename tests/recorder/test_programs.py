"""Programs in the pattern of their frameworks' documentation, each run plain, with ``record`` and with ``tracekit run``.

They take some minutes: `python -m pytest -m frameworks tests/recorder/test_programs.py`; without the marker one of them runs.
"""

import importlib.util
import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

import tracekit.recorder.startup as startup
from tests.recorder.launching import JOBS, run_job
from tracekit.analyses import comparison
from tracekit.job.load import LoadOptions, load_job
from tracekit.manifest import decode

#: Program -> axes of the mesh that is found, kind of the optimizer, (kind of collective, purpose) -> calls of a rank and step, where they
#: are to be counted by hand: GPT of two blocks in three FSDP2 units; one bucket; two messages a micro-batch and stage.
KNOWN = {
    "ddp_conv": ({"dp_replicate": 2}, "SGD", {("all_reduce", "gradient_sync"): 1, ("broadcast", "parameter_sync"): 2}),
    "ddp_gpt_accumulating": ({"dp_replicate": 2}, "AdamW", {("all_reduce", "gradient_sync"): 1, ("broadcast", "parameter_sync"): 1}),
    "ddp_lstm": ({"dp_replicate": 2}, "SGD", {("all_reduce", "gradient_sync"): 1}),
    "ddp_compiled": ({"dp_replicate": 2}, "AdamW", None),
    "gan": ({"dp_replicate": 2}, "Adam", {("all_reduce", "gradient_sync"): 2}),
    "zero_redundancy": ({"dp_shard": 2}, "Adam", None),
    "fsdp2": ({"dp_shard": 2}, "Adam", {("all_gather", "parameter_gather"): 5, ("reduce_scatter", "gradient_scatter"): 3}),
    "fsdp2_mixed_recomputed": ({"fsdp": 2}, "AdamW", {("all_gather", "parameter_gather"): 5, ("reduce_scatter", "gradient_scatter"): 3}),
    "fsdp1": ({"dp_shard": 2}, "SGD", None),
    "tensor_parallel": ({"model": 2}, "AdamW", None),
    "pipeline_1f1b": ({"pp": 2}, "Adam", {("send", "pipeline"): 4, ("recv", "pipeline"): 4}),
    "pipeline_gpipe": ({"pp": 2}, "Adam", {("send", "pipeline"): 4, ("recv", "pipeline"): 4}),
    "distillation": ({"dp_replicate": 2}, "Adam", None),
    "averaged_by_hand": ({}, "LBFGS", None),
    "deepspeed_zero1": ({"dp_shard": 2}, None, None),
    "deepspeed_zero2": ({"dp_shard": 2}, None, None),
    "deepspeed_zero3": ({"dp_shard": 2}, None, None),
    "accelerate": ({"dp_replicate": 2}, "AdamW", {("all_reduce", "gradient_sync"): 1, ("broadcast", "parameter_sync"): 1}),
    "autocast_scaled": ({"dp_replicate": 2}, "AdamW", {("all_reduce", "gradient_sync"): 1, ("broadcast", "parameter_sync"): 1}),
    "tensor_sequence": ({"tp": 2}, "AdamW", {("all_gather", "sequence_parallel"): 11, ("reduce_scatter", "sequence_parallel"): 10}),
    "ring_attention": ({"dp_replicate": 2}, "SGD", {("all_reduce", "gradient_sync"): 1, ("send", "unknown"): 2, ("recv", "unknown"): 2}),
    "hf_trainer": ({"dp_replicate": 2}, "AdamW", {("all_reduce", "gradient_sync"): 1}),
    "lightning": ({"dp_replicate": 2}, "AdamW", {("all_reduce", "gradient_sync"): 1}),
}
SHORT = ("pipeline_1f1b",)
RUNS = [pytest.param(name, marks=() if name in SHORT else pytest.mark.frameworks) for name in KNOWN]


def losses(name, *arguments, **environment):
    told = run_job(JOBS / "programs.py", name, "8", *arguments, environment=environment)
    return sorted(re.findall(r"rank \d step \d+: [-+.e\d]+", told)), told


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_its_losses_are_the_same_and_what_is_said_of_it_is_true(name, tmp_path):
    for start, package in (("deepspeed", "deepspeed"), ("accelerate", "accelerate"), ("hf", "transformers"), ("lightning", "lightning")):
        if name.startswith(start) and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    plain, _ = losses(name)
    assert len(plain) == 16
    with_record, _ = losses(name, str(tmp_path / "record"))
    assert with_record == plain
    hook = {"PYTHONPATH": str(Path(startup.__file__).parent), "TRACEKIT_RECORD": str(tmp_path / "run"), "TRACEKIT_STEPS": "4:6"}
    with_run, told = losses(name, **hook)
    assert with_run == plain
    assert "tracekit (rank 0): recorded steps 4 to 5" in told
    for kind, steps in (("record", [3, 4]), ("run", [4, 5])):
        check(name, tmp_path / kind, steps)


def check(name, folder, steps):
    axes, optimizer, calls = KNOWN[name]
    manifests = [decode((folder / f"rank_0000{rank}.manifest.json").read_bytes(), "m") for rank in range(2)]
    assert [m.steps for m in manifests] == [steps, steps]
    assert {axis.name: axis.size for axis in manifests[0].mesh} == axes
    assert manifests[0].parameters
    assert optimizer is None or manifests[0].optimizer.kind == optimizer
    job = load_job([str(folder)], LoadOptions())
    own = job.operations[(job.operations["rank"] == 0) & (job.operations["launch_step_number"] == steps[0])]
    seen = own.groupby(["kind", "purpose"]).size().to_dict()
    assert calls is None or {key: seen.get(key, 0) for key in calls} == calls
    found = comparison.analyze(job)
    assert not [finding.text for finding in found.findings() if "predicts 0" in finding.text]
