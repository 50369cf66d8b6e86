"""HTA on an exported folder reads what it reads of the recorded files: every event to 1 ns, and what it concludes from them."""

import gzip
import json
import re

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

from tests.builder import Trace, group
from tests.real import REAL, real_traces
from tracekit.cli.main import cli
from tracekit.export import hta as handed

pytest.importorskip("hta", reason="the extra hta is not installed")

#: Spellings of a category that HTA's reading keeps apart or leaves as they are, and tracekit's does not.
ONE = {
    "cuda_driver": "cuda_runtime", "Runtime": "cuda_runtime", "Operator": "cpu_op", "Kernel": "kernel", "Memcpy": "gpu_memcpy",
    "Memset": "gpu_memset", "mtia_ccp_events": "kernel", "mtia_runtime": "cuda_runtime", "fwdbwd": "", "ac2g": "",
}  # fmt: skip
#: Files that HTA reads otherwise, or not at all, with the reason.
EXCEPT = {
    "hta_mtia_inference_rank0.json.gz": "waits and records of events stand among MTIA's work: kernels to HTA, synchronisation to tracekit",
}


def load(folder, files=None):
    """HTA's own reading: exact times, all steps."""
    with handed.quiet():
        import hta.common.trace
        from hta.configs.env_options import HTAEnvOptions

        HTAEnvOptions.instance().set_disable_ns_rounding(True)
        trace = hta.common.trace.Trace(trace_files=files, trace_dir=str(folder))
        trace.load_traces(include_last_profiler_step=True, use_multiprocessing=False, use_memory_profiling=False)
    return trace


def analysis(trace):
    with handed.quiet():
        import hta.trace_analysis

        found = object.__new__(hta.trace_analysis.TraceAnalysis)
        found.t = trace
    return found


def events(trace, rank):
    """Category, name, times [ns after the first], lane, stream and correlation of each event, sorted."""
    names = trace.symbol_table.get_sym_table()
    frame = trace.get_trace(rank)
    found = pd.DataFrame({
        "cat": [ONE.get(names[code], names[code]) for code in frame["cat"]],
        "name": [names[code] for code in frame["name"]],
        "ts": np.rint((frame["ts"] - frame["ts"].min()) * 1000).astype(np.int64),
        "dur": np.rint(frame["dur"] * 1000).astype(np.int64),
        "stream": frame["stream"].replace(2**32 - 1, -1),  # "no stream" as an unsigned number: tracekit reads it as such
        "correlation": frame["correlation"],
    })  # fmt: skip
    return found.sort_values(["cat", "name", "stream", "correlation", "ts", "dur"], ignore_index=True)


def export(path, folder):
    done = CliRunner().invoke(cli, ["export", str(path), "--hta", str(folder), "--no-cache"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done


def assert_alike(path, folder):
    export(path, folder)
    ours = load(folder)
    (rank,) = ours.traces
    theirs = load(path.parent, {rank: str(path)})
    mine, own = events(ours, rank), events(theirs, rank)
    assert len(mine) == len(own)
    for column in ("cat", "name", "stream", "correlation"):
        assert mine[column].tolist() == own[column].tolist(), column
    for column in ("ts", "dur"):
        assert np.abs(mine[column].to_numpy() - own[column].to_numpy()).max() <= 1, column
    if (theirs.get_trace(rank)["stream"] == 2**32 - 1).any():
        return  # HTA counts what waits on "no stream" as work of the device; tracekit's file says that it is none
    for question, exactly in (("get_queue_length_summary", 1e-9), ("get_temporal_breakdown", 2e-3)):
        answers = [asked(trace, question, rank) for trace in (ours, theirs)]
        assert len(answers[0]) == len(answers[1])
        assert np.allclose(answers[0], answers[1], rtol=0, atol=exactly, equal_nan=True), "times to 1 ns at each end"


def asked(trace, question, rank):
    """HTA's answer; nothing where HTA itself stumbles (no device, no launches in the trace)."""
    with handed.quiet():
        try:
            found = analysis(trace)
            answer = found.get_queue_length_summary([rank]) if "queue" in question else found.get_temporal_breakdown(visualize=False)
        except (IndexError, KeyError, ValueError):
            answer = None
    return pd.DataFrame() if answer is None else answer


def small(tmp_path, rank=0, ranks=(0, 1)):
    trace = Trace(rank, len(ranks), groups=[group("0", "default_pg", list(ranks))])
    for step in (1, 2, 3):
        at = 1000 * step
        trace.step(step, at, 990)
        trace.operator("aten::linear", at + 10, 60)
        trace.kernel('gemm<float> "x"', start=at + 100.125, dur=35.250, launch=at + 20)
        trace.collective("allreduce", f"{at + 200}.250", "40.333", elements=1 << 20, seq=step, stream=20, launch=at + 30)
    return trace.write(tmp_path / f"rank{rank}.json")


def test_a_hand_made_trace_is_read_alike(tmp_path):
    assert_alike(small(tmp_path), tmp_path / "hta")


@pytest.mark.slow
@pytest.mark.parametrize("path", real_traces(), ids=lambda path: path.name)
def test_a_real_trace_is_read_alike(path, tmp_path):
    if path.name in EXCEPT:
        pytest.skip(EXCEPT[path.name])
    assert_alike(path, tmp_path / "hta")


@pytest.mark.slow
def test_a_whole_real_job_is_read_alike(tmp_path):
    """Eight ranks: HTA finds them by what the files say, and the waits between them are the same on the job's clock."""
    job = REAL / "dlrm_v100_8ranks"
    if not job.exists():
        pytest.skip("the traces of real jobs are not beside the checkout")
    export(job, tmp_path / "hta")
    ours, theirs = load(tmp_path / "hta"), load(job)
    assert sorted(ours.traces) == sorted(theirs.traces) == list(range(8))
    with handed.quiet():
        times = [analysis(trace).get_temporal_breakdown(visualize=False).sort_values("rank") for trace in (ours, theirs)]
    assert np.allclose(times[0], times[1], rtol=0, atol=2e-3)


def test_ranks_that_only_tracekit_tells_apart_are_numbered(tmp_path):
    """Two files without distributedInfo: HTA alone would take both for rank 0."""
    for rank in (0, 1):
        path = small(tmp_path, rank)
        document = json.loads(path.read_text())
        del document["distributedInfo"]
        path.write_text(json.dumps(document))
    export(tmp_path, tmp_path / "hta")
    assert sorted(load(tmp_path / "hta").traces) == [0, 1]


def test_what_was_read_is_carried_over_and_read_again(tmp_path):
    """tracekit says the same of the exported folder, names, sizes and groups included."""
    for rank in (0, 1):
        small(tmp_path, rank)
    export(tmp_path, tmp_path / "hta")
    found = []
    for folder in (tmp_path, tmp_path / "hta"):
        paths = [str(path) for path in sorted(folder.glob("rank*"))]
        done = CliRunner().invoke(cli, ["analyze", *paths, "--no-report", "--no-cache", "-q", "--json", "-", "--operations"])
        document = json.loads(done.stdout)
        rows = document["operations"]
        found.append(
            (document["breakdown"], [{k: v for k, v in row.items() if "start" not in k} for row in rows], document["process_groups"])
        )
    assert found[0] == found[1] and len(found[0][1]) == 3


def test_broken_shapes_and_names_of_strangers_stay_json(tmp_path):
    path = small(tmp_path)
    text = path.read_text().replace('"aten::linear"', '"</script>\\u0000\\ud800"')
    path.write_text(text)
    export(path, tmp_path / "hta")
    raw = gzip.decompress((tmp_path / "hta" / "rank_0.json.gz").read_bytes()).decode()
    assert "</script>" not in raw
    json.loads(raw)


def test_a_folder_with_other_traces_is_refused_and_an_own_one_renewed(tmp_path):
    path, folder = small(tmp_path), tmp_path / "hta"
    export(path, folder)
    export(path, folder)
    (folder / "other.json").write_text("{}")
    done = CliRunner().invoke(cli, ["export", str(path), "--hta", str(folder), "--no-cache"])
    assert done.exit_code == 2 and re.search(r"other\.json, which Holistic Trace Analysis would read as well", done.output)


@pytest.mark.parametrize("more", [["-o", "x.json"], ["--list"], ["--table", "operations"]])
def test_a_folder_for_hta_is_written_alone(more, tmp_path):
    done = CliRunner().invoke(cli, ["export", str(small(tmp_path)), "--hta", str(tmp_path / "hta"), *more])
    assert done.exit_code == 2 and "--hta writes a folder of its own" in done.output


def test_nothing_of_hta_is_printed(tmp_path):
    done = CliRunner().invoke(cli, ["hta", "critical-path", str(small(tmp_path)), "--annotation", "nothing", "--no-cache"])
    assert done.exit_code == 2 and len(done.output.strip().splitlines()) == 1
