"""Record the samples again: every workload once, small, on the CPU.

    python sample_traces/record_all.py [NAME...]
    python sample_traces/record_all.py list | plans

Each sample is a folder of this one with a trace and a manifest of every rank, as ``tracekit record`` left them; only the machine's name is
replaced by ``sample-host``. ``README.md`` lists what each shows. Needs tracekit[record]; the samples of other frameworks need their extra.
"""

from __future__ import annotations

import dataclasses
import gzip
import importlib
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec

HERE = Path(__file__).parent
SMALL = ["--layers", "2", "--active", "2"]
SHORT = ["--layers", "2", "--active", "1"]

#: Sample -> arguments of ``tracekit record``. Names say how many ranks were recorded; ``fake`` ones are single ranks of a larger mesh.
SAMPLES = {
    "ddp_2": ["ddp", "--verify", *SMALL],
    "ddp_accumulation_2": ["ddp", "--micro-batches", "2", "--gradient-as-bucket-view", *SMALL],
    "ddp_recompute_2": ["ddp", "--recompute", "full", "--swiglu", "--verify", *SHORT],
    "zero1_2": ["zero1", "--verify", *SMALL],
    "zero1_reduce_scatter_2": ["zero1", "--exchange", "reduce_scatter", "--verify", *SHORT],
    "zero2_2": ["zero2", "--verify", *SMALL],
    "zero3_2": ["zero3", "--verify", *SMALL],
    "fsdp1_2": ["fsdp1", "--verify", *SMALL],
    "fsdp2_2": ["fsdp2", "--verify", *SMALL],
    "fsdp2_bf16_2": ["fsdp2", "--precision", "bf16", *SMALL],
    "fsdp2_no_reshard_2": ["fsdp2", "--reshard-after-forward", "false", *SMALL],
    "fsdp2_uneven_3": ["fsdp2", "--nproc", "3", "--vocabulary", "515", "--verify", *SMALL],
    "fsdp2_recompute_2": ["fsdp2", "--recompute", "selective", "--wrap", "ends", "--verify", *SHORT],
    "fsdp2_too_coarse_2": ["fsdp2", "--wrap", "whole", "--verify", *SHORT],
    "fsdp2_too_fine_2": ["fsdp2", "--wrap", "modules", "--verify", *SHORT],
    "hsdp_4": ["hsdp", "--verify", *SMALL],
    "tensor_parallel_2": ["tensor_parallel", "--verify", *SMALL],
    "tensor_parallel_gathered_2": ["tensor_parallel", "--divide-vocabulary", "gather", "--verify", *SHORT],
    "tensor_parallel_loss_2": ["tensor_parallel", "--divide-vocabulary", "loss", "--verify", *SHORT],
    "sequence_parallel_2": ["sequence_parallel", "--verify", *SMALL],
    "context_parallel_allgather_2": ["context_parallel_allgather", "--verify", *SMALL],
    "context_parallel_ring_4": ["context_parallel_ring", "--verify", *SMALL],
    "context_parallel_blockwise_2": ["context_parallel_blockwise", "--verify", *SMALL],
    "context_parallel_ulysses_2": ["context_parallel_ulysses", "--verify", *SMALL],
    "pipeline_gpipe_2": ["pipeline_gpipe", "--verify", *SMALL],
    "pipeline_1f1b_2": ["pipeline_1f1b", "--verify", *SMALL],
    "pipeline_interleaved_2": ["pipeline_interleaved", "--verify", "--layers", "4", "--active", "2"],
    "pipeline_zbv_2": ["pipeline_interleaved", "--zero-bubble", "zbv", "--verify", "--layers", "4", "--active", "1"],
    "expert_parallel_2": ["expert_parallel", "--verify", *SMALL],
    "expert_parallel_dropped_2": ["expert_parallel", "--capacity-factor", "1.0", "--padding", "--auxiliary-loss", "0.01", *SHORT],
    "hybrid_3d_8": ["hybrid_3d", "--verify", *SMALL],
    "hybrid_4d_16": ["hybrid_4d", "--verify", "--layers", "2", "--active", "1"],
    "hybrid_5d_8": ["hybrid_5d", "--mesh", "pp=2,ep=2,dp_shard=2,cp=1,tp=1", "--verify", *SMALL],
    "hybrid_5d_fake_rank45_of_64": ["hybrid_5d", "--backend", "fake", "--mesh", "pp=2,ep=2,dp_shard=4,cp=2,tp=2", "--rank", "45", *SMALL],
    "fsdp2_fake_rank5_of_16": ["fsdp2", "--backend", "fake", "--mesh", "pp=2,dp_shard=4,tp=2", "--rank", "5", *SMALL],
    "collectives_4": ["collectives", "--max-bytes", "65536", "--factor", "16", "--iterations", "3"],
    "deepspeed_zero1_2": ["deepspeed_zero", "--stage", "1", *SMALL],
    "deepspeed_zero2_2": ["deepspeed_zero", "--stage", "2", *SMALL],
    "deepspeed_zero3_2": ["deepspeed_zero", "--stage", "3", *SMALL],
    "accelerate_ddp_2": ["accelerate_ddp", *SMALL],
    "accelerate_fsdp2_2": ["accelerate_fsdp2", *SMALL],
}


def record(name: str) -> None:
    """Run one workload into its folder, which is emptied before."""
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "tracekit", "record", *SAMPLES[name], "-o", str(folder)], check=True, cwd=HERE.parent)
    for path in sorted(folder.iterdir()):
        without_host(path)


def without_host(path: Path) -> None:
    """Replace the machine's name; a compressed file comes out the same whenever it is written."""
    packed = path.suffix == ".gz"
    data = gzip.decompress(path.read_bytes()) if packed else path.read_bytes()
    if path.suffix not in (".gz", ".json"):
        return
    text = json.loads(data)
    host = text.get("host_name") or text.get("host") if isinstance(text, dict) else None
    if host:
        data = data.replace(json.dumps(host).encode(), b'"sample-host"')
    path.write_bytes(gzip.compress(data, 9, mtime=0) if packed else data)


def list_samples() -> None:
    """Write the table of all samples into README.md, from their manifests."""
    rows = ["| sample | mesh | backend | ranks | steps | verified | size | command |", "|-|-|-|-|-|-|-|-|"]
    for folder in sorted(path for path in HERE.iterdir() if path.is_dir()):
        manifests = sorted(folder.glob("*.manifest.json"))
        if not manifests:
            continue
        told = json.loads(manifests[0].read_text())
        mesh = ", ".join(f"{axis['name']}={axis['size']}" for axis in told["mesh"])
        alone = f"rank {told['rank']} of {told['world_size']}"
        ranks = alone if len(manifests) < told["world_size"] else str(len(manifests))
        steps = f"{told['steps'][0]}-{told['steps'][-1]}"
        verified = "yes" if any(note.startswith("verified") for note in told["notes"]) else ""
        size = sum(path.stat().st_size for path in folder.iterdir()) // 1000
        rows.append(f"| `{folder.name}` | {mesh} | {told['backend']} | {ranks} | {steps} | {verified} | {size} kB | `{told['command']}` |")
    path = HERE / "README.md"
    before, start, rest = path.read_text().partition("<!-- samples -->")
    _, end, after = rest.partition("<!-- end -->")
    path.write_text(before + start + "\n" + "\n".join(rows) + "\n" + end + after)


def write_plans() -> None:
    """Write what each workload says of its plan into the manifests that are there; the traces stay as they are."""
    import torch
    from tracekit.workloads.common import planned
    from tracekit.workloads.common.job import DATA_AXES, Job
    from tracekit.workloads.common.settings import mesh_sizes, parse
    from tracekit.workloads.common.transformer import Shape

    for path in sorted(HERE.glob("*/*.manifest.json")):
        told = msgspec.json.decode(path.read_bytes())
        _, _, name, *arguments = shlex.split(told["command"])
        workload = importlib.import_module(f"tracekit.workloads.{name}")
        settings, options = parse(workload, arguments)
        sizes, shape = mesh_sizes(workload, settings), Shape(**{f.name: getattr(settings, f.name) for f in dataclasses.fields(Shape)})
        axes = getattr(workload, "DATA_AXES", DATA_AXES)
        job = Job(settings, shape, sizes, None, torch.device("cpu"), told["rank"], axes)  # type: ignore[arg-type]
        path.write_bytes(msgspec.json.encode({**told, "plan": planned.of(workload, job, options)}))


def main() -> None:
    """Record the samples named on the command line, all without one; ``list`` only writes the table, ``plans`` only the plans."""
    if sys.argv[1:] == ["list"]:
        list_samples()
        return
    if sys.argv[1:] == ["plans"]:
        write_plans()
        return
    chosen = sys.argv[1:] or list(SAMPLES)
    strange = [name for name in chosen if name not in SAMPLES]
    if strange:
        raise SystemExit(f"there is no sample {strange[0]}; there are {', '.join(SAMPLES)}")
    for name in chosen:
        print(name, flush=True)
        record(name)
    list_samples()


if __name__ == "__main__":
    main()
