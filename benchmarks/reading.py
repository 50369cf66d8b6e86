"""Reading a trace to tables: time and peak memory of tracekit and of HTA's JSON reader, on the same files in the same run.

    python benchmarks/make_traces.py INPUTS
    python benchmarks/reading.py INPUTS [50MB 50MB.gz 250MB 250MB.gz 1GB] [--runs 3]

Every measurement is a process of its own. Before the clock starts it imports what it needs and reads the sample trace, so that neither
side pays for loading code (with tracekit: the compiled scanner, out of numba's cache); ``--cold`` leaves that reading out for both.
Needs the extra hta. HTA takes several times the file in memory, so it is left out for inputs above ``--hta-up-to``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from measure import ROOT, machine, settle, timed

SAMPLE = str(ROOT / "sample_traces" / "ddp_gloo_2ranks" / "rank0.pt.trace.json.gz")

OURS = """
from tracekit.readers.kineto import read_trace
from tracekit.readers.sources import find_sources
source = find_sources([{path!r}]).sources[0]
"""
HTA = """
import logging, warnings
logging.disable(logging.CRITICAL)
warnings.simplefilter("ignore")
from hta.common.trace_parser import parse_trace_dataframe
from hta.configs.parser_config import ParserBackend, ParserConfig
config = ParserConfig.get_default_cfg().clone()
config.parser_backend = ParserBackend.JSON
"""


WARM_OURS = f"read_trace(find_sources([{SAMPLE!r}]).sources[0])\n"
WARM_HTA = f"parse_trace_dataframe({SAMPLE!r}, config)\n"


def compare(path: Path, runs: int, with_hta: bool, cold: bool) -> str:
    """One line of the table."""
    settle(path.parent)
    size = path.stat().st_size / 1e6
    ours = timed(OURS.format(path=str(path)) + ("" if cold else WARM_OURS), "tables = read_trace(source)", runs)
    line = f"{path.parent.name:>10} {size:8.1f} {ours.seconds:10.3f} {ours.peak_mb:9.0f}"
    if not with_hta:
        return line
    hta = timed(HTA + ("" if cold else WARM_HTA), f"frame = parse_trace_dataframe({str(path)!r}, config)", max(1, runs - 2))
    return line + f" {hta.seconds:9.2f} {hta.peak_mb:9.0f} {hta.seconds / ours.seconds:8.1f} {ours.peak_mb / hta.peak_mb:7.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", type=Path)
    parser.add_argument("names", nargs="*", default=["50MB", "50MB.gz", "250MB", "250MB.gz", "1GB"])
    parser.add_argument("--runs", type=int, default=5, help="of tracekit; HTA gets two fewer")
    parser.add_argument("--hta-up-to", default="250MB", help="largest plain input that HTA reads too (default: 250MB)")
    parser.add_argument("--cold", action="store_true", help="the measured reading is the first of its process")
    given = parser.parse_args()
    start = "first reading of a process" if given.cold else "code loaded before"
    print(f"{machine()}; {start}; median of {given.runs} runs; MB = 10^6 bytes\n")
    print(f"{'input':>10} {'MB':>8} {'tracekit s':>10} {'peak MB':>9} {'HTA s':>9} {'peak MB':>9} {'x faster':>8} {'memory':>7}")
    limit = (given.inputs / given.hta_up_to / "rank0.json").stat().st_size * 1.1
    for name in given.names:
        path = next((given.inputs / name).glob("rank0.json*"), None)
        if path is None:
            print(f"{name:>10} is not there: python benchmarks/make_traces.py {given.inputs} {name}")
            continue
        plain = given.inputs / name.removesuffix(".gz") / "rank0.json"
        compare_with_hta = plain.stat().st_size <= limit
        if name == given.names[0]:
            timed(OURS.format(path=str(path)), "tables = read_trace(source)", 1)
        print(compare(path, given.runs, compare_with_hta, given.cold), flush=True)


if __name__ == "__main__":
    main()
