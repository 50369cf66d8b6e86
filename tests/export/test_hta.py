"""Holistic Trace Analysis on handed-over frames gives what it gives on its own reading, without its rounding and with the last step."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

import tracekit
from tests.builder import Trace
from tests.real import REAL
from tracekit.cli.main import cli
from tracekit.errors import InputError
from tracekit.export import hta as handed
from tracekit.job.load import LoadOptions, load_job

pytest.importorskip("hta", reason="the extra hta is not installed")


def small(tmp_path):
    """Three steps; in each an operator launches two kernels, which start some time later; times with nanoseconds."""
    trace = Trace(0, 1)
    for step in (1, 2, 3):
        at = 1000 * step
        trace.step(step, at, 990)
        trace.operator("aten::linear", at + 10, 60)
        for kernel in (0, 1):
            begin = at + 20 + 20 * kernel
            trace.kernel(f"gemm_{kernel}", start=at + 100.125 + 40 * kernel, dur=35.250, launch=begin)
    return trace.write(tmp_path / "rank0.json")


def own(path):
    """HTA's own reading: exact times, all steps."""
    with handed.quiet():
        import hta.common.trace
        import hta.trace_analysis
        from hta.configs.env_options import HTAEnvOptions

        HTAEnvOptions.instance().set_disable_ns_rounding(True)
        trace = hta.common.trace.Trace(trace_files={0: str(path)}, trace_dir=str(path.parent))
        trace.load_traces(include_last_profiler_step=True, use_multiprocessing=False, use_memory_profiling=False)
        found = object.__new__(hta.trace_analysis.TraceAnalysis)
        found.t = trace
    return found


def read(path):
    return load_job([str(path)], LoadOptions(), {handed.REDUCER: handed.reduce})


def assert_alike(path, annotation, instance):
    job, theirs = read(path), own(path)
    (rank,) = job.ranks
    ours = handed.analysis(job)
    with handed.quiet():
        queues = [done.get_queue_length_summary([at]).reset_index(drop=True) for done, at in ((ours, rank), (theirs, 0))]
        assert queues[0].shape == queues[1].shape and np.allclose(queues[0], queues[1], rtol=0, atol=1e-12)
        paths = [
            done.critical_path_analysis(at, annotation, instance)[0].get_critical_path_breakdown()
            for done, at in ((ours, rank), (theirs, 0))
        ]
    sums = [found.groupby("bound_by")["duration"].sum() for found in paths]
    assert sums[0].index.tolist() == sums[1].index.tolist()
    assert (sums[0] - sums[1]).abs().max() <= 1e-3, "to 1 ns"


def test_a_hand_made_trace_is_seen_alike(tmp_path):
    assert_alike(small(tmp_path), "ProfilerStep", 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hta_a100_ddp_nccl_rank0of2.json.gz"])
def test_a_real_trace_is_seen_alike(name):
    if not (REAL / name).exists():
        pytest.skip("the traces of real jobs are not beside the checkout")
    assert_alike(REAL / name, "ProfilerStep", 1)


def test_python_gets_the_analysis(tmp_path):
    done = tracekit.load(small(tmp_path), cache=False, hta=True).hta()
    with handed.quiet():
        assert done.get_profiler_steps() == [1, 2, 3]
    with pytest.raises(InputError, match="hta=True"):
        tracekit.load(tmp_path, cache=False).hta()


def test_the_frames_are_exact_to_the_nanosecond(tmp_path):
    trace = handed.analysis(read(small(tmp_path))).t
    names = trace.symbol_table.get_sym_table()
    frame = trace.get_trace(0)
    kernels = frame[frame["stream"] == 7].sort_values("ts")
    assert [names[code] for code in kernels["name"]] == ["gemm_0", "gemm_1"] * 3
    assert np.rint(kernels["dur"] * 1000).tolist() == [35250.0] * 6
    assert np.rint(kernels["ts"].diff().dropna() * 1000).tolist() == [40000.0, 960000.0] * 2 + [40000.0]
    assert kernels["iteration"].tolist() == [1, 1, 2, 2, 3, 3]


def run(*arguments):
    return CliRunner().invoke(cli, ["hta", *map(str, arguments), "--no-cache", "-q"])


def test_queue_length_by_hand(tmp_path):
    """Two launches before the first kernel starts: at most two wait."""
    done = run("queue-length", small(tmp_path), "--format", "json")
    (row,) = json.loads(done.stdout)
    assert (row["rank"], row["stream"], row["queue_length_count"], row["queue_length_max"]) == (0, 7, 12, 2)


def test_kernel_sequences_by_hand(tmp_path):
    done = run("kernel-sequences", small(tmp_path), "--operator", "aten::linear", "--least", 2, "--format", "json")
    (row,) = json.loads(done.stdout)
    assert (row["pattern"], row["count"]) == ("aten::linear|gemm_0|gemm_1", 3)
    assert row["GPU kernel duration (us)"] == pytest.approx(3 * 2 * 35.25)


def test_critical_path_has_shares_that_add_up(tmp_path):
    rows = json.loads(run("critical-path", small(tmp_path), "--format", "json").stdout)
    assert sum(row["share"] for row in rows) == pytest.approx(1)


def test_counters_of_cupti_by_hand(tmp_path):
    """HTA reads the file itself; one counted range a launch, in order."""
    trace = Trace(0, 1)
    trace.step(1, 0, 900)
    trace.operator("aten::mm", 10, 50)
    trace.kernel("gemm", start=100, dur=30, launch=20)
    counters = {"smsp__inst_executed.sum": 7, "graph": 0}
    trace.add("cuda_profiler_range", "gemm", 100, 30, pid=0, tid=0, stream=0, correlation=-1, **counters)
    done = run("cupti-counters", trace.write(tmp_path / "rank0.json"), "--format", "json")
    (row,) = json.loads(done.stdout)
    assert (row["rank"], row["name"], row["smsp__inst_executed.sum"], row["bottom_level_op"]) == (0, "gemm", 7, "aten::mm")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["kernel-sequences", "--operator", "aten::nothing"], "below 'aten::nothing'"),
        (["critical-path", "--rank", "3"], "rank 3 was not read"),
        (["critical-path", "--annotation", "nothing"], "no critical path"),
        (["cupti-counters"], "no counters of CUPTI"),
        (["queue-length", "--executor", "dask"], "reads on this machine"),
        (["critical-path", "--annotation", "nothing"], "--annotation names another range"),
    ],
)
def test_what_is_not_there_is_said_in_a_line(arguments, reason, tmp_path):
    done = run(arguments[0], small(tmp_path), *arguments[1:])
    assert done.exit_code == 2 and reason in done.stderr
    assert "Traceback" not in done.output


def test_a_job_without_device_has_no_queue(tmp_path):
    trace = Trace(0, 1)
    trace.step(1, 0, 100)
    trace.operator("aten::mm", 10, 50)
    job = read(trace.write(tmp_path / "rank0.json"))
    with pytest.raises(InputError, match="no kernel"):
        handed.queue_length(job, job.ranks)
