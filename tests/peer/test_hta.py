"""The peer's numbers: Holistic Trace Analysis computes the same temporal breakdown, overlap and kernel breakdown from the same file.

HTA's arithmetic is left as it is. What it does to the input is taken out: its rounding to microseconds (HTA_DISABLE_NS_ROUNDING), the
steps and the kernels without a launch that it drops, its floating-point microseconds, which become whole nanoseconds before it calculates,
and its view that the kernels of symmetric memory (multimem) are compute. So both look at the same pieces of device work, and everything
has to agree to 1 ns.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from tests.builder import Trace, group
from tests.real import REAL, real_traces
from tracekit.analyses import breakdown, kernels, overlap
from tracekit.job.activity import Activity
from tracekit.job.window import build_activity
from tracekit.readers.kineto import read_trace
from tracekit.readers.sources import find_sources
from tracekit.trace.steps import Steps

pytest.importorskip("hta", reason="the extra hta is not installed")


ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"}  # the last two: torch before 1.12


@contextmanager
def quiet() -> Iterator[None]:
    """HTA runs into deprecations of pandas; they are its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@dataclass(frozen=True)
class Figures:
    """What both sides say, ns."""

    idle: int
    compute: int
    other: int  # HTA's non-compute: busy with communication or copies only
    window: int
    overlap: int
    overlap_percent: float
    kernels: dict[str, tuple[int, int, int]]  # by name: sum, shortest, longest


def hta_figures(path: Path) -> Figures:
    with quiet(), pytest.MonkeyPatch.context() as patch:
        import hta.analyzers.breakdown_analysis as their_breakdown
        import hta.analyzers.communication_analysis as their_overlap
        from hta.analyzers.breakdown_analysis import BreakdownAnalysis
        from hta.analyzers.communication_analysis import CommunicationAnalysis
        from hta.common.trace import Trace as Loaded
        from hta.configs.env_options import HTAEnvOptions

        def kernel_type(name: str, theirs: Callable[[str], str] = their_breakdown.get_kernel_type) -> str:
            return "COMMUNICATION" if "multimem_" in name else theirs(name)

        for module in (their_breakdown, their_overlap):
            patch.setattr(module, "get_kernel_type", kernel_type)

        class Unfiltered(Loaded):
            def _filter_irrelevant_gpu_kernels(self, include_last_profiler_step: bool | None = False) -> None:
                names = self.symbol_table.get_sym_table()
                for rank, frame in self.traces.items():
                    on_device = frame["cat"].map(lambda code: names[code].lower() in ON_DEVICE)
                    chosen = frame[on_device].copy()
                    for column in ("ts", "dur"):
                        chosen[column] = np.rint(chosen[column].to_numpy(np.float64) * 1000).astype(np.int64)
                    chosen["end"] = chosen["ts"] + chosen["dur"]
                    self.traces[rank] = chosen

        HTAEnvOptions.instance().set_disable_ns_rounding(True)
        loaded = Unfiltered(trace_files={0: str(path)}, trace_dir=str(path.parent))
        loaded.load_traces(include_last_profiler_step=True, use_multiprocessing=False, use_memory_profiling=False)
        times = BreakdownAnalysis.get_temporal_breakdown(loaded, visualize=False).iloc[0]
        # the number of kernels is a limit above which HTA merges the short ones
        kinds, kernels = BreakdownAnalysis.get_gpu_kernel_breakdown(loaded, visualize=False, num_kernels=10**6, include_memory_kernels=True)
        percent = float("nan")
        if "COMMUNICATION" in " ".join(kinds["kernel_type"]):
            percent = float(CommunicationAnalysis.get_comm_comp_overlap(loaded, visualize=False)["comp_comm_overlap_pctg"].iloc[0])
    both = kinds["kernel_type"].str.contains("COMPUTATION overlapping COMMUNICATION")
    return Figures(
        idle=int(times["idle_time(us)"]),
        compute=int(times["compute_time(us)"]),
        other=int(times["non_compute_time(us)"]),
        window=int(times["kernel_time(us)"]),
        overlap=int(kinds.loc[both, "sum"].sum()),
        overlap_percent=percent,
        kernels={
            str(name): (int(total), int(low), int(high))
            for name, total, low, high in zip(kernels["name"], kernels["sum (us)"], kernels["min (us)"], kernels["max (us)"], strict=True)
        },
    )


def our_activity(path: Path) -> Activity:
    return build_activity(read_trace(find_sources([str(path)]).sources[0]))


def our_figures(activity: Activity) -> Figures:
    """From what the analyses themselves report, over the whole window as one step: HTA knows no steps here either."""
    nothing = np.empty(0, np.int64)
    whole = replace(activity, steps=Steps(nothing, nothing, nothing, "none"))
    parts, exposure, sums = breakdown.reduce(whole), overlap.reduce(whole), kernels.reduce(whole)
    assert parts is not None and exposure is not None and sums is not None
    other = int(parts.exposed_comm_ns[0] + parts.exposed_copy_ns[0])
    work = activity.device
    window = int(work.end.max() - work.start.min())
    outside = activity.window[1] - activity.window[0] - window  # host only: before the first and behind the last kernel
    hidden, total = int(exposure.hidden_ns[0]), int(exposure.comm_ns[0])
    return Figures(
        idle=int(parts.idle_ns[0] + parts.unknown_ns[0]) - outside,
        compute=int(parts.compute_ns[0]),
        other=other,
        window=window,
        overlap=hidden,
        overlap_percent=100 * hidden / total if total else float("nan"),
        kernels={name: (int(a), int(b), int(c)) for name, a, b, c in zip(sums.name, sums.total, sums.least, sums.most, strict=True)},
    )


def assert_agree(ours: Figures, hta: Figures) -> None:
    for quantity in ("idle", "compute", "other", "window", "overlap"):
        assert abs(getattr(ours, quantity) - getattr(hta, quantity)) <= 1, quantity
    assert ours.kernels.keys() == hta.kernels.keys()
    for name, figures in ours.kernels.items():
        assert np.abs(np.subtract(figures, hta.kernels[name])).max() <= 1, name
    assert ours.overlap_percent == pytest.approx(hta.overlap_percent, abs=0.0051, nan_ok=True)


def test_agrees_on_overlapping_streams(tmp_path: Path) -> None:
    """Three streams, touching and nested kernels, a copy in a gap, kernels of length 0, one kernel without a launch."""
    trace = Trace(rank=0, world_size=2, groups=[group("0", "default_pg", [0, 1])])
    trace.step(1, 0, 500)
    trace.step(2, 500, 500)
    for i in range(8):
        at = 100 * i + 20
        trace.kernel("gemm", f"{at}.125", "30.501", stream=7, launch=at - 15)
        trace.kernel("gemm_small", f"{at + 30}.626", "12.001", stream=7, launch=at - 9)
        trace.kernel("elementwise", f"{at + 5}.000", "3.007", stream=9, launch=at - 3)
        trace.collective("allreduce", f"{at + 25}.250", "40.333", elements=1 << 20, seq=i, stream=20, launch=at)
    trace.kernel("late", "910.001", "20.002", stream=7)
    trace.kernel("empty", "940.5", 0, stream=7, launch=935)
    trace.add("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", "950.750", "7.125", pid=0, tid=7, device=0, stream=7, correlation=5)
    path = trace.write(tmp_path / "rank0.json")
    ours = our_figures(our_activity(path))
    # by hand: in each of 8 rounds computing 30.501 + 12.001, of which 5.376 + 12.001 while communicating
    assert ours.overlap == 8 * 17_377
    assert ours.compute == 8 * 42_502 + 20_002
    assert ours.other == 8 * (40_333 - 17_377) + 7_125
    assert_agree(ours, hta_figures(path))


#: Whose kernels HTA counts as communication as well.
_HTA_KNOWS = {"nccl", "rccl", "symmetric_memory", "nccl_symmetric", "custom", "gloo", "unknown"}


@pytest.mark.parametrize("path", real_traces(), ids=lambda path: path.name)
def test_agrees_on_real_traces(path: Path) -> None:
    activity = our_activity(path)
    if activity.on_cpu:
        pytest.skip("a trace without device work; HTA has no figures for it")
    others = set(activity.operations["implementation"].astype("str")) - _HTA_KNOWS
    if others or "mtia" in path.name:
        pytest.skip(f"HTA counts {', '.join(sorted(others)) or 'work on MTIA'} as something else")
    assert_agree(our_figures(activity), hta_figures(path))


def test_real_traces_are_all_seen() -> None:
    if not REAL.exists():
        pytest.skip("the real traces are not beside the project")
    assert len(real_traces()) >= 14
