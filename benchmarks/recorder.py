"""What recording costs: the same training loop with and without ``tracekit.record``, step times in turn.

    python benchmarks/recorder.py [--hidden 512] [--rounds 5]

Loops with and without the recorder alternate, so that a noisy machine troubles both alike; ratios are those of the medians of all steps
inside the recorded windows, of wall time and of the CPU time of the process (which other programs trouble less). Writing the files, after
the window, is told apart.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule
from tracekit.workloads.common.reference import adam, batch_of
from tracekit.workloads.common.transformer import Shape, Transformer, initialize, loss_of

from tracekit import record

WAIT, WARMUP, ACTIVE = 1, 1, 5


def steps_of(shape: Shape, samples: int, recorder_of) -> tuple[list[tuple[float, float]], float]:
    """((wall, CPU seconds) of each step of the window, seconds of the stop) of one loop."""
    model = Transformer(shape)
    initialize(model, 0)
    optimizer = adam(model.parameters(), 1e-3)
    times = []
    with recorder_of(model, optimizer) as recorder:
        for number in range(WAIT + WARMUP + ACTIVE):
            ids, targets = batch_of(shape, samples, 0, number)
            start, busy = time.perf_counter(), time.process_time()
            loss_of(model(ids), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            taken = time.perf_counter() - start, time.process_time() - busy
            before = time.perf_counter(), time.process_time()
            recorder.step()
            stop, worked = time.perf_counter() - before[0], time.process_time() - before[1]
            if number >= WAIT + WARMUP:
                last = number == WAIT + WARMUP + ACTIVE - 1
                times.append((taken[0] + (0 if last else stop), taken[1] + (0 if last else worked)))
    return times, stop


class Nothing:
    """Stands in for a recorder."""

    def step(self) -> None:
        """Nothing."""


@contextlib.contextmanager
def nothing(model, optimizer):
    yield Nothing()


def plain_profiler(folder):
    @contextlib.contextmanager
    def around(model, optimizer):
        with profile(
            activities=[ProfilerActivity.CPU],
            schedule=schedule(wait=WAIT, warmup=WARMUP, active=ACTIVE, repeat=1),
            on_trace_ready=lambda p: p.export_chrome_trace(str(Path(folder) / "trace.json.gz")),
            record_shapes=True,
            profile_memory=True,
        ) as profiler:
            yield profiler

    return around


def recorded(folder, **options):
    return lambda model, optimizer: record(folder, model=model, optimizer=optimizer, wait=WAIT, warmup=WARMUP, active=ACTIVE, **options)


def measure(shape: Shape, samples: int, rounds: int) -> dict[str, dict[str, float]]:
    """Kind of loop -> median step, its ratio to the bare one, seconds to write the files."""
    with tempfile.TemporaryDirectory() as folder:
        kinds = {
            "bare": nothing,
            "torch.profiler, shapes and memory": plain_profiler(folder),
            "tracekit.record": recorded(folder),
            "tracekit.record, no memory": recorded(folder, memory=False),
            "tracekit.record, saved tensors": recorded(folder, saved_tensors=True),
            "tracekit.record, dispatch labels": recorded(folder, labels="dispatch"),
        }
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
        stops: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(rounds):
            for name, around in kinds.items():
                found, stop = steps_of(shape, samples, around)
                times[name] += found
                stops[name].append(stop)
    medians = {name: [statistics.median(column) for column in zip(*found, strict=True)] for name, found in times.items()}
    wall, busy = medians["bare"]
    return {
        name: {
            "step_ms": round(1000 * own[0], 2),
            "ratio": round(own[0] / wall, 3),
            "cpu_ratio": round(own[1] / busy, 3),
            "stop_s": round(statistics.median(stops[name]), 3),
        }
        for name, own in medians.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    shape = Shape(layers=chosen.layers, hidden=chosen.hidden, heads=8, kv_heads=8, ffn=4 * chosen.hidden, sequence=128)
    print(json.dumps(measure(shape, chosen.batch, chosen.rounds), indent=1))


if __name__ == "__main__":
    main()
