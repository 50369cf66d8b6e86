"""The baseline of every sample, beside it: ``NAME.baseline.json``.

    python sample_traces/baselines.py check [NAME...]    what .ci/run does: every sample against its baseline
    python sample_traces/baselines.py write [NAME...]    after a change of what is measured, or of a sample; look at the difference

A sample is always the same files, so a figure that fell was changed by tracekit. Counts and bytes may not become fewer either.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tracekit.checks.baseline import baseline_of, encode, read_baseline
from tracekit.checks.check import check
from tracekit.checks.thresholds import thresholds_of
from tracekit.cli.recordings import read_side
from tracekit.compare.figures import Run
from tracekit.compare.words import sizes
from tracekit.job.load import LoadOptions

HERE = Path(__file__).parent
EXACT = {"limit": "exact", "direction": "both"}
THRESHOLDS = {
    "collectives.*.calls": EXACT,
    "collectives.*.bytes": EXACT,
    "memory.peak": EXACT,
    "memory.parameters": EXACT,
    "memory.optimizer_state": EXACT,
}


def samples() -> list[str]:
    """Folders of this one that hold traces, by name; recordings of hangs have dumps instead of figures."""
    return sorted(path.name for path in HERE.iterdir() if path.is_dir() and any(path.glob("*.pt.trace.json*")))


def baseline_file(name: str) -> Path:
    """Where the baseline of a sample is."""
    return HERE / f"{name}.baseline.json"


def figures(name: str) -> Run:
    """The figures of a sample, under its own name on every machine."""
    import msgspec

    return msgspec.structs.replace(read_side([str(HERE / name)], LoadOptions(), quiet=True)[0], name=name, version="")


def write(name: str) -> None:
    """Write the baseline of a sample."""
    baseline_file(name).write_bytes(encode(baseline_of([figures(name)], THRESHOLDS)))


def wrong(name: str) -> list[str]:
    """What of a sample is not as its baseline says."""
    baseline = read_baseline(str(baseline_file(name)))
    checked = check(baseline.runs, [figures(name)], thresholds_of(baseline.thresholds, name))
    lines = [f"{name}: {row.change.key} {sizes(row.change)}" for row in checked.of("fell")]
    return [*lines, f"{name}: {checked.problem}"] if checked.problem else lines


def main() -> None:
    """Check, or write, the samples named on the command line; all without one."""
    what, chosen = sys.argv[1:2], sys.argv[2:] or samples()
    if what == ["write"]:
        for name in chosen:
            write(name)
        return
    if what != ["check"]:
        raise SystemExit(__doc__)
    found = [line for name in chosen for line in wrong(name)]
    print("\n".join(found) or f"{len(chosen)} samples are as their baselines say")
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
