"""Holistic Trace Analysis on what tracekit has read: its frames are built from tracekit's tables, not parsed by it again.

HTA (traceinsight, before that holistictraceanalysis) holds a frame a rank, with codes of a symbol table for categories and names and times
in microseconds. Here these come from the columns of ``RankTables``: exact to the nanosecond (times count from the first event of the job,
so that a float holds them), the last step included, every spelling of a category brought to one. Only CUPTI's counters are not among the
tables: for them HTA reads the file itself.
"""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from tracekit.errors import InputError, UsageError
from tracekit.job.activity import Activity
from tracekit.job.model import Job
from tracekit.trace.events import Category, Int64Array, RankTables
from tracekit.units import NS_PER_US, NULL, NULL32

#: The reducer's name among those of the analyses.
REDUCER = "export_hta"
#: How HTA spells the categories that it looks at.
SPELLED = {
    Category.OPERATOR: "cpu_op",
    Category.USER_ANNOTATION: "user_annotation",
    Category.RUNTIME: "cuda_runtime",
    Category.KERNEL: "kernel",
    Category.MEMCPY: "gpu_memcpy",
    Category.MEMSET: "gpu_memset",
    Category.GPU_ANNOTATION: "gpu_user_annotation",
    Category.PYTHON: "python_function",
    Category.SYNC: "cuda_sync",
    Category.OVERHEAD: "overhead",
    Category.OTHER: "other",
}
#: HTA's column -> (side table, column, what it says where there is none).
_SIDE = {
    "bytes": ("copy", "bytes", -1),
    "wait_on_stream": ("sync", "wait_on_stream", -1),
    "wait_on_cuda_event_record_corr_id": ("sync", "wait_on_cuda_event_record_corr_id", -1),
    "python_id": ("python", "Python id", -1),
    "python_parent_id": ("python", "Python parent id", -1),
}


def reduce(activity: Activity) -> pd.DataFrame:
    """The complete events of one window as HTA has them, times in nanoseconds, categories and names as text."""
    tables = activity.tables
    rows = tables.rows(*SPELLED)
    rows = rows[(tables.ts[rows] != NULL) & (tables.dur[rows] >= 0)]
    lanes = tables.lane[rows]
    pids, tids = (pd.array([getattr(lane, name) for lane in tables.lanes], dtype=object) for name in ("pid", "tid"))
    frame = {
        "index": rows,
        "cat": pd.Categorical([SPELLED[Category(int(code))] for code in np.unique(tables.category[rows])]).take(
            np.unique(tables.category[rows], return_inverse=True)[1]
        ),
        "name": _names(tables, rows),
        "pid": pids.take(lanes),
        "tid": tids.take(lanes),
        "ts": tables.ts[rows],
        "dur": tables.dur[rows],
        "stream": np.where(tables.stream[rows] == NULL32, -1, tables.stream[rows]).astype(np.int64),
        "correlation": np.where(tables.correlation[rows] == NULL, -1, tables.correlation[rows]),
        "external_id": np.where(tables.external_id[rows] == NULL, -1, tables.external_id[rows]),
    }
    for column, (side, name, absent) in _SIDE.items():
        frame[column] = _side(tables, rows, side, name, absent)
    return pd.DataFrame(frame)


def _names(tables: RankTables, rows: Int64Array) -> Any:
    codes, place = np.unique(tables.name[rows], return_inverse=True)
    return pd.Categorical([tables.text(int(code)) for code in codes]).take(place)


def _side(tables: RankTables, rows: Int64Array, side: str, name: str, absent: int) -> Int64Array:
    values, at = tables.side[side], tables.side[side].at(rows)
    found = np.full(len(rows), absent, np.int64)
    there = at >= 0
    found[there] = values.columns[name][at[there]]
    return np.where(found == NULL, absent, found)


def analysis(job: Job) -> Any:
    """HTA's ``TraceAnalysis`` of a job that was read with the reducer ``REDUCER``; the first window of each rank.

    UsageError where HTA is not installed.
    """
    frames: dict[int, pd.DataFrame] = {}
    for rank, index, frame in job.reduced(REDUCER):
        if rank not in frames and len(frame):
            frames[rank] = frame.assign(ts=job.aligned(index, frame["ts"]))
    if not frames:
        raise InputError("no rank has events that Holistic Trace Analysis could look at", "in Python: tracekit.load(path, hta=True)")
    return _analysis(frames, {rank: _file(job, rank) for rank in frames})


def _file(job: Job, rank: int) -> str:
    return next(window.coverage.file for window in job.traced if window.rank == rank)


def _analysis(frames: Mapping[int, pd.DataFrame], files: Mapping[int, str]) -> Any:
    modules = _installed()
    with quiet():
        symbols = modules["symbols"].TraceSymbolTable()
        words = {text for frame in frames.values() for column in ("cat", "name") for text in frame[column].cat.categories}
        symbols.add_symbols(sorted(words))
        codes = pd.Series(symbols.get_sym_id_map())
        first = min(int(frame["ts"].min()) for frame in frames.values())
        trace = object.__new__(modules["trace"].Trace)
        vars(trace).update(
            is_parsed=True,
            trace_path=".",
            parser_config=modules["config"].ParserConfig.get_default_cfg(),
            trace_files=dict(files),
            traces={rank: _linked(frame, first, codes, symbols, modules) for rank, frame in frames.items()},
            symbol_table=symbols,
            meta_data={rank: {} for rank in frames},
            min_ts=0,
        )
        trace._filter_irrelevant_gpu_kernels(include_last_profiler_step=True)
        for rank, frame in trace.traces.items():
            trace.traces[rank] = frame.set_index("index", drop=False).rename_axis(None)
    found = object.__new__(modules["analysis"].TraceAnalysis)
    found.t = trace
    return found


def _linked(frame: pd.DataFrame, first: int, codes: pd.Series[Any], symbols: Any, modules: Mapping[str, Any]) -> pd.DataFrame:
    """One rank's frame in HTA's units, with its own links from launches to kernels and its own numbers of steps."""
    found = frame.copy()
    for column in ("cat", "name"):
        found[column] = found[column].astype(object).map(codes).astype(np.int64)
    found["ts"] = (found["ts"] - first) / NS_PER_US
    found["dur"] = found["dur"] / NS_PER_US
    found.index = pd.Index(found["index"].to_numpy())
    found = modules["trace"].transform_correlation_to_index(found, symbols)
    modules["trace"].add_iteration(found, symbols)
    linked: pd.DataFrame = found.assign(end=found["ts"] + found["dur"])
    return linked


def _installed() -> dict[str, Any]:
    try:
        with quiet():
            import hta.common.trace as trace
            import hta.common.trace_symbol_table as symbols
            import hta.configs.parser_config as config
            import hta.trace_analysis as analysis
    except ImportError:
        raise UsageError("this needs Holistic Trace Analysis", "pip install traceinsight, or install tracekit with the extra hta") from None
    return {"trace": trace, "symbols": symbols, "config": config, "analysis": analysis}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without HTA's progress, its own words about what it does not find, and the deprecations that it runs into."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def queue_length(job: Job, ranks: Sequence[int]) -> pd.DataFrame:
    """Launched and not yet finished operations of each stream: count, mean, deviation, least, quartiles, most."""
    with quiet():
        found = analysis(job).get_queue_length_summary(list(ranks))
    if found is None or not len(found):
        raise InputError("no kernel of these ranks has a launch in the trace: there is no queue to measure")
    found.columns = ["_".join(filter(None, map(str, name))) if isinstance(name, tuple) else str(name) for name in found.columns]
    table: pd.DataFrame = found.reset_index()
    return table


def kernel_sequences(job: Job, rank: int, operator: str, least: int, most: int) -> pd.DataFrame:
    """The most frequent sequences of kernels that an operator launches. HTA's overlaid copy of the trace is not kept."""
    with tempfile.TemporaryDirectory(prefix="tracekit-hta-") as folder, quiet():
        done = analysis(job)
        # HTA lays the sequences over a copy of the raw trace and writes it: one event stands for that trace, and nothing is written.
        stand_in = {"ph": "X", "pid": "Spans", "cat": "Trace", "name": "PyTorch Profiler", "args": {}}
        done.t.get_raw_trace_for_one_rank = lambda **_: {"traceEvents": [dict(stand_in)]}
        done.t.write_raw_trace = lambda *_: None
        try:
            found = done.get_frequent_cuda_kernel_sequences(operator, folder, min_pattern_len=least, rank=rank, top_k=most, visualize=False)
        except (IndexError, KeyError, ValueError) as error:
            problem = f"rank {rank} has no sequences of kernels below {operator!r} ({type(error).__name__} in Holistic Trace Analysis)"
            raise InputError(problem) from None
    if found is None or not len(found):
        raise InputError(f"rank {rank} has no sequence of {least} kernels below {operator!r}", "give another --operator or --least")
    table: pd.DataFrame = found.head(most)
    return table


def critical_path(job: Job, rank: int, annotation: str, instance: int) -> pd.DataFrame:
    """What bounds the critical path through one instance of an annotation: durations by what they wait for [us] and their shares."""
    with quiet():
        done = analysis(job)
        graph, good = done.critical_path_analysis(rank, annotation, instance) or (None, False)
        if graph is None or not good:
            problem = f"Holistic Trace Analysis finds no critical path of rank {rank} through {annotation!r} number {instance}"
            raise InputError(problem, "--annotation names another range of the trace, --instance another one of them (from 0)")
        edges = graph.get_critical_path_breakdown()
    summed = edges.groupby("bound_by", dropna=False)["duration"].agg(["count", "sum"]).reset_index()
    summed.columns = pd.Index(["bound_by", "edges", "duration_us"])
    total = summed["duration_us"].sum()
    share = summed["duration_us"] / total if total else None
    table: pd.DataFrame = summed.assign(share=share).sort_values("duration_us", ascending=False)
    return table


def cupti_counters(files: Mapping[int, str], ranks: Sequence[int]) -> pd.DataFrame:
    """Counters of CUPTI's range profiler by kernel, with the operators above it; read by HTA itself."""
    modules = _installed()
    chosen = {rank: files[rank] for rank in ranks if rank in files}
    with quiet():
        trace = modules["trace"].Trace(trace_files=chosen, trace_dir=".")
        trace.load_traces(include_last_profiler_step=True, use_multiprocessing=False, use_memory_profiling=False)
        done = object.__new__(modules["analysis"].TraceAnalysis)
        done.t = trace
        names = set(trace.symbol_table.get_sym_table())
        if "cuda_profiler_range" not in names:
            raise InputError(
                "the traces hold no counters of CUPTI", "record them with torch.profiler's _ExperimentalConfig(profiler_metrics=[...])"
            )
        frames = {rank: done.get_cupti_counter_data_with_operators([rank])[0] for rank in sorted(chosen)}
    found = [frame.assign(rank=rank) for rank, frame in frames.items() if frame is not None]
    if not found:
        raise InputError("launches and counted kernels do not match one to one")
    table: pd.DataFrame = pd.concat(found, ignore_index=True)
    return table
