"""Who owns the memory peak of rank 0 under each strategy, on the same model: recorded, analyzed, printed as a table.

    python benchmarks/memory_table.py [--hidden 256] [--layers 4]

Needs tracekit[record]; two ranks on gloo, Adam, fp32 unless it says bf16.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile

RUNS = {
    "plain": ["tensor_parallel", "--mesh", "tp=1"],
    "DDP": ["ddp"],
    "ZeRO-1": ["zero1"],
    "FSDP1": ["fsdp1"],
    "FSDP2": ["fsdp2"],
    "FSDP2, no reshard": ["fsdp2", "--reshard-after-forward", "false"],
    "FSDP2, bf16": ["fsdp2", "--precision", "bf16", "--reduce-dtype", "bf16"],
    "tensor parallel": ["tensor_parallel"],
}
COLUMNS = ("parameters", "optimizer_state", "gradients", "gathered_parameters", "unsharded_gradients", "communication_buffers",
           "activations", "temporaries", "inputs", "unattributed")  # fmt: skip


def peak(arguments: list[str], size: list[str]) -> dict[str, object]:
    """The entry of rank 0 under ``memory`` in the JSON of ``tracekit analyze``."""
    with tempfile.TemporaryDirectory() as folder:
        call = [sys.executable, "-m", "tracekit"]
        subprocess.run([*call, "record", *arguments, *size, "--active", "2", "-o", folder], check=True, capture_output=True)
        done = subprocess.run([*call, "analyze", folder, "-o", f"{folder}/r.html", "--json", "-", "-q"], check=True, capture_output=True)
        return next(entry for entry in json.loads(done.stdout)["memory"] if entry["rank"] == 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    chosen = parser.parse_args()
    hidden = str(chosen.hidden)
    size = ["--hidden", hidden, "--ffn", str(4 * chosen.hidden), "--heads", "8", "--kv-heads", "8", "--layers", str(chosen.layers)]
    print("| MB | peak | " + " | ".join(column.replace("_", " ") for column in COLUMNS) + " |")
    print("|-" * (len(COLUMNS) + 2) + "|")
    for name, arguments in RUNS.items():
        entry = peak(arguments, size)
        values = [entry["peak_bytes"], *(entry["categories"][column] for column in COLUMNS)]
        print(f"| {name} | " + " | ".join(f"{value / 1e6:.3f}" for value in values) + " |", flush=True)


if __name__ == "__main__":
    main()
