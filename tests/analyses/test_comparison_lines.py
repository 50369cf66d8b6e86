"""Lines of a few figures: verdicts, causes, what a trace implies of itself, the fitted cost of an axis, times on a known device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.analyses.made import Trace, job_of
from tracekit import analyses
from tracekit.analyses import comparison
from tracekit.analyses.collectives.links import cost, links
from tracekit.analyses.comparison.curve import moment_times, most_allocated
from tracekit.analyses.comparison.implied import lines as implied
from tracekit.analyses.comparison.lines import DIFFERS, MATCH, NOT_MEASURED, line
from tracekit.analyses.comparison.predicted import Key, Prediction, Volume, predict
from tracekit.analyses.comparison.time import class_times, step_times
from tracekit.analyses.comparison.traffic import cause, traffic_lines
from tracekit.estimate.hardware import HARDWARE
from tracekit.job.load import LoadOptions, load_job
from tracekit.job.model import Job
from tracekit.manifest import Axis, Batch, Manifest, Precision
from tracekit.memory.summary import Curve

SAMPLES = Path(__file__).resolve().parents[2] / "sample_traces"
MODEL = {"architecture": "transformer", "layers": 2, "hidden": 16, "heads": 2, "ffn": 32, "vocabulary": 40, "sequence": 8}
GATHER: Key = ("dp_shard", "all_gather", "parameter_gather")
SCATTER: Key = ("dp_shard", "reduce_scatter", "gradient_scatter")
AGAIN = "the root is gathered again in backward, or units are freed between micro-batches"


def fsdp2(micro_batches: int = 1) -> Prediction:
    """Two blocks and the root over two ranks."""
    fp32 = Precision("float32", "float32", "float32", "float32")
    batch = Batch(micro_batch=1, micro_batches=micro_batches)
    plan = {"strategy": {"name": "fsdp2", "sync_every_micro_batch": micro_batches == 1}}
    return predict(0, Manifest(plan=plan, mesh=[Axis("dp_shard", 2)], model=MODEL, precision=fp32, batch=batch))


# Verdicts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("predicted", "measured", "tolerance", "verdict", "ratio"),
    [
        (100, 100, 0.0, MATCH, 1.0),
        (100, 101, 0.0, DIFFERS, 1.01),
        (10_000, 10_500, 0.05, MATCH, 1.05),
        (10_000, 10_501, 0.05, DIFFERS, 1.0501),
        (10_000, 9_499, 0.05, DIFFERS, 0.9499),
        (0, 64, 0.05, MATCH, None),  # some scalars
        (0, 65, 0.05, DIFFERS, None),
        (0, 0, 0.0, MATCH, 1.0),
        (None, 5, 0.0, NOT_MEASURED, None),
        (5, None, 0.05, NOT_MEASURED, None),
    ],
)
def test_verdicts(predicted: int | None, measured: int | None, tolerance: float, verdict: str, ratio: float | None) -> None:
    found = line("memory.peak", 0, predicted, measured, "bytes", "because", tolerance)
    assert (found.verdict, found.ratio) == (verdict, ratio)
    assert found.why == ("" if verdict == MATCH else "because")


@given(st.integers(0, 2**50), st.integers(0, 2**50), st.sampled_from([0.0, 0.02, 0.05]))
def test_a_larger_tolerance_never_turns_a_match_into_a_difference(predicted: int, measured: int, tolerance: float) -> None:
    strict = line("memory.peak", 0, predicted, measured, "bytes", "because", tolerance)
    loose = line("memory.peak", 0, predicted, measured, "bytes", "because", tolerance + 0.1)
    assert loose.verdict == MATCH or strict.verdict == DIFFERS


# Causes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "expected", "seen", "why"),
    [
        (("tp", "all_reduce", "tensor_parallel"), (0, 0), (4, 800), "the model knows no such collective in this job"),
        (("dp_shard", "all_reduce", "metrics"), (0, 0), (1, 4), "a flag or a metric that the program reduces by itself"),
        (GATHER, (5, 500), (0, 0), "predicted, and not in the trace"),
        (GATHER, (5, 500), (6, 600), f"1 all-gather more: {AGAIN}"),
        (GATHER, (5, 500), (3, 300), "fewer all-gathers: units stay gathered after forward (reshard_after_forward=False)"),
        (SCATTER, (3, 300), (6, 300), "the same bytes in other buckets"),
        (SCATTER, (3, 300), (3, 600), "twice the bytes: it travels in an element type twice as wide (gradients reduced in fp32)"),
        (SCATTER, (3, 300), (3, 150), "half the bytes: it travels in an element type half as wide"),
        (SCATTER, (3, 300), (3, 312), "a few bytes: padding, or shards of unequal length"),
        (SCATTER, (3, 300), (4, 371), "buckets or units are cut differently than the model takes them to be"),
    ],
)
def test_causes(key: Key, expected: tuple[int, int], seen: tuple[int, int], why: str) -> None:
    assert cause(fsdp2(), key, Volume(*expected), Volume(*seen)) == why


def test_calls_that_were_taken_for_another_purpose_are_named() -> None:
    """Where parameters are sharded over the ranks of cp only, nothing in a trace tells their gathers from those of keys."""
    traffic = fsdp2().traffic
    keys = ("dp_shard", "all_gather", "context_parallel")
    found = {each.quantity: each for each in traffic_lines(fsdp2(), {SCATTER: traffic[SCATTER], keys: traffic[GATHER]}, 1)}
    for purpose in ("parameter_gather", "context_parallel"):
        why = found[f"collectives.dp_shard.all_gather.{purpose}.calls"].why
        assert why.startswith("calls of all_gather over dp_shard are as predicted, all purposes together")
    assert found["collectives.dp_shard.reduce_scatter.gradient_scatter.calls"].verdict == MATCH


def test_sizes_that_the_trace_does_not_tell_are_not_measured() -> None:
    told = [each for each in traffic_lines(fsdp2(), {SCATTER: Volume(3, -1)}, 1) if "scatter" in each.quantity]
    found = {each.quantity.rpartition(".")[2]: each for each in told}
    assert (found["calls"].verdict, found["bytes"].verdict) == (MATCH, NOT_MEASURED)
    assert (found["bytes"].measured, found["bytes"].why) == (None, "the trace does not tell the sizes of all calls")


def test_a_peak_above_the_models_is_a_warning() -> None:
    low, high = (line("memory.peak", rank, 10**9, size, "bytes", "because", 0.05) for rank, size in ((0, 9 * 10**8), (3, 12 * 10**8)))
    (warning,) = (f for f in comparison.Comparison([low, high], []).findings() if f.id == "comparison.peak")
    assert (warning.severity, warning.value) == ("warning", 1.2)
    assert warning.text == "The peak of rank 3 is 1.20 times the model's (1.2 GB, not 1 GB): because."


def test_reductions_in_every_micro_batch_are_named() -> None:
    found = {each.quantity: each for each in traffic_lines(fsdp2(4), {SCATTER: Volume(12, 4 * fsdp2(4).traffic[SCATTER].full_bytes)}, 1)}
    calls = found["collectives.dp_shard.reduce_scatter.gradient_scatter.calls"]
    assert (calls.predicted, calls.measured) == (3, 12)
    assert calls.why.startswith("once in each of the 4 micro-batches, not once a step")
    assert found["collectives.dp_shard.all_gather.parameter_gather.calls"].why == "predicted, and not in the trace"


# Traces without a manifest -------------------------------------------------------------------------------------------


def sharded(gathers: int, scatters: int, width: int = 1) -> Job:
    """Two ranks of FSDP: so many all-gathers and reduce-scatters of 1000 elements over a group called dp_shard."""
    traces = []
    for rank in range(2):
        trace = Trace(rank, 2)
        trace.step(1, 0, 10_000)
        own = {"group": "3", "description": "mesh_dp_shard", "ranks": "[0, 1]"}
        for i in range(gathers):
            start, seq = 100 + 100 * i, i + 1
            trace.collective("_allgather_base", start, 50, elements=500, out_elements=1000, seq=seq, launch=start - 50, **own)
        for i in range(scatters):
            start, seq, size = 5000 + 100 * i, gathers + i + 1, 1000 * width
            trace.collective("_reduce_scatter_base", start, 50, elements=size, out_elements=size // 2, seq=seq, launch=start - 50, **own)
        traces.append(trace)
    return job_of(*traces)


@pytest.mark.parametrize(
    ("gathers", "scatters", "width", "calls", "size"),
    [
        (5, 3, 1, (5, MATCH, ""), MATCH),  # every unit in forward, all but the root again in backward
        (3, 3, 1, (3, MATCH, ""), MATCH),  # kept gathered
        (10, 3, 1, (5, DIFFERS, "units are gathered more than once in each direction"), MATCH),
        (5, 3, 2, (5, MATCH, ""), DIFFERS),
    ],
)
def test_what_a_sharded_group_implies_of_itself(gathers: int, scatters: int, width: int, calls: tuple[int, str, str], size: str) -> None:
    found = {each.quantity.rpartition(".")[2]: each for each in implied(sharded(gathers, scatters, width))}
    counted = found["calls"]
    assert (counted.predicted, counted.measured, counted.verdict) == (calls[0], gathers, calls[1])
    assert counted.why.startswith(calls[2])
    assert found["bytes_a_call"].verdict == size
    if size == DIFFERS:
        assert "twice as wide as parameters are gathered in (fp32 against 16 bits)" in found["bytes_a_call"].why
    document = comparison.analyze(sharded(gathers, scatters, width)).json()
    assert len(document["comparison"]) == 2


@pytest.mark.parametrize(("last", "verdict"), [(1000, MATCH), (900, DIFFERS)])
def test_gradients_are_the_same_in_every_step_and_rank(last: int, verdict: str) -> None:
    traces = []
    for rank in range(2):
        trace = Trace(rank, 2)
        for step in (1, 2, 3):
            start = step * 1000
            trace.step(step, start, 1000)
            trace.kernel("gemm", start + 100, 100, launch=start + 20)
            own = {"group": "3", "description": "mesh_dp_replicate", "ranks": "[0, 1]"}
            size = last if step == 3 else 1000
            trace.collective("allreduce", start + 300, 50, elements=size, seq=step, launch=start + 250, **own)
        traces.append(trace)
    found = {each.quantity.rpartition(".")[2]: each for each in implied(job_of(*traces))}
    assert found["calls"].verdict == MATCH
    assert (found["bytes"].predicted, found["bytes"].measured, found["bytes"].verdict) == (4000, 4 * last, verdict)


def test_a_trace_that_implies_nothing_has_a_reason() -> None:
    trace = Trace(0, 1)
    trace.step(1, 0, 1000)
    trace.kernel("gemm", 100, 100, launch=5)
    document = comparison.analyze(job_of(trace)).json()
    assert document["links"] == []
    assert document["not_measured"]["comparison"].startswith("the traces come without the recorder's manifests")
    assert document["not_measured"]["links"] == "no collective of known size was seen on all ranks of its group"


# Links ---------------------------------------------------------------------------------------------------------------


def priced(alpha_us: float, gb_s: float, elements: tuple[int, ...], slower: float = 1.0) -> Job:
    """Two ranks; all-gathers of so many fp32 elements take exactly what the line says, all-reduces ``slower`` times as long."""
    traces = []
    for rank in range(2):
        trace = Trace(rank, 2)
        trace.step(1, 0, 1_000_000)
        start, seq = 100.0, 1
        for count in elements:
            all_reduce = 2 * alpha_us + count * 4 / gb_s / 1000  # 2 (x-1) steps, 2 (x-1)/x of the bytes
            gather = alpha_us + count * 2 / gb_s / 1000  # x-1 steps, (x-1)/x of the bytes
            trace.collective("allreduce", start, all_reduce * slower, elements=count, seq=seq, launch=start - 50)
            start += 2 * all_reduce * slower + 100
            trace.collective("_allgather_base", start, gather, elements=count // 2, out_elements=count, seq=seq + 1, launch=start - 50)
            start, seq = start + 2 * gather + 100, seq + 2
        traces.append(trace)
    return job_of(*traces)


@pytest.mark.parametrize(("alpha_us", "gb_s"), [(10.0, 1.0), (2.5, 100.0), (40.0, 0.5)])
def test_alpha_and_beta_are_those_the_times_were_made_of(alpha_us: float, gb_s: float) -> None:
    (found,) = links(priced(alpha_us, gb_s, (1000, 20_000, 300_000)))
    assert found.operations == 6 and found.sizes == 3
    assert found.latency_us == pytest.approx(alpha_us, rel=0.02)
    assert found.gb_s == pytest.approx(gb_s, rel=0.02)
    assert found.residual == pytest.approx(0, abs=0.02)
    assert found.best_gb_s is not None and found.best_gb_s <= gb_s * 1.001  # latency takes its part
    assert cost(found, "all_reduce", 2, 80_000) == pytest.approx(2 * alpha_us + 80 / gb_s, rel=0.02)
    assert cost(found, "send", 2, 80_000) is None


def test_what_does_not_follow_the_line_shows_as_residual_and_in_its_class() -> None:
    job = priced(10.0, 1.0, (1000, 20_000, 40_000), slower=3.0)
    (found,) = links(job)
    assert found.residual is not None and found.residual > 0.25
    times = {each.quantity.split(".")[2]: each for each in class_times(job, [found])}
    assert {kind: each.measured for kind, each in times.items()} == {"all_reduce": 3 * 100.0, "all_gather": 50.0}  # of the middle size
    assert times["all_reduce"].verdict == DIFFERS
    assert times["all_reduce"].ratio is not None and times["all_reduce"].ratio > 1.25
    assert times["all_reduce"].why == "calls of this class took 72 to 540 us: the axis' line is that of all its classes"


def test_sizes_that_are_all_alike_make_no_line() -> None:
    (found,) = links(sharded(5, 3))
    assert (found.latency_us, found.gb_s, found.residual) == (None, None, None)
    assert "all of one size" in found.problem


# A device that the model knows ---------------------------------------------------------------------------------------


def test_times_on_a_known_device() -> None:
    job = load_job([str(SAMPLES / "ddp_2")], LoadOptions(), analyses.reducers())
    predictions = [predict(w.rank, w.manifest) for w in job.windows if w.rank is not None and w.manifest is not None]
    found = {each.quantity: each for each in step_times(job, predictions, HARDWARE["h100"])}
    steps = [row["step_us"] for row in analyses.run(job, ["breakdown"])["breakdown"].json()["breakdown"]]
    time, mfu = found["step.time"], found["step.mfu"]
    assert time.measured == pytest.approx(sum(steps) / len(steps))
    assert time.predicted is not None and 0 < time.predicted < time.measured  # two CPU cores are no H100
    # 6 N per token beside attention's 12 L h s, 2 ranks of 4 samples of 64 tokens; embeddings multiply nothing
    tokens, matrices = 2 * 4 * 64, 2 * (4 * 128 * 128 + 2 * 128 * 512) + 512 * 128
    flop = tokens * (6 * matrices + 12 * 2 * 128 * 64)
    assert mfu.measured == pytest.approx(flop / (time.measured * 1e-6 * 2 * HARDWARE["h100"].peak_flops(4)), rel=0.02)
    assert mfu.why.startswith("the model assumes that half the peak FLOP/s are reached")


def test_hardware_is_recognised_by_a_word_of_its_name() -> None:
    known: dict[str, Any] = {"NVIDIA H100 80GB HBM3": "h100", "NVIDIA A100-SXM4-80GB": "a100", "AMD Instinct MI300X": "mi300x"}
    for name, preset in known.items():
        assert comparison.hardware_of(name) == HARDWARE[preset]
    assert comparison.hardware_of("CPU") is None and comparison.hardware_of("") is None


def test_moments_of_the_model_stand_evenly_around_the_peak() -> None:
    assert moment_times(5, 2, (0, 100), 40).tolist() == [0, 20, 40, 60, 80]
    assert moment_times(3, 0, (0, 90), 0).tolist() == [0, 30, 60]
    curve = Curve(np.array([0, 10, 25, 41, 99]), np.array([5, 9, 2, 7, 1]), np.array([], np.int64), {})
    assert most_allocated(curve, np.array([0, 20, 40, 60, 80]), 100).tolist() == [9, 9, 7, 7, 7]
