"""The analytical model beside every sample recording, as Markdown: ``docs/predicted.md`` is what this prints.

    python benchmarks/predicted.py > docs/predicted.md

Figures of memory, traffic and pipelines are the same on every machine that reads the samples; those of time are of the machine that
recorded them. How far a line is off: of memory the difference as a share of the rank's measured peak, of all else abs(ratio - 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tracekit import analyses
from tracekit.analyses import comparison
from tracekit.analyses.comparison.lines import DIFFERS, MATCH, NOT_MEASURED, Line
from tracekit.job.load import LoadOptions, load_job

HEAD = """Printed by `python benchmarks/predicted.py` from the recordings in `sample_traces/`: what the analytical model says of each, from
its manifest alone, beside what the traces show. [json.md](json.md) says what each line is and when it counts as a match.
"""
TIMES = """The samples were recorded by processes that share two CPU cores, over gloo, so that transfers of one size differ by a factor of
ten and more. Collectives of a class are set beside the line fitted to their axis; step time, exposed communication and MFU need a device
whose figures the model knows, and are not measured here.
"""
SAMPLES = Path(__file__).resolve().parents[1] / "sample_traces"


def deviation(line: Line, peaks: dict[int | None, float]) -> float:
    """How far a line is off, as a share."""
    assert line.measured is not None and line.predicted is not None
    if line.quantity.startswith("memory."):
        return abs(line.measured - line.predicted) / peaks[line.rank]
    return abs(line.ratio - 1) if line.ratio is not None else 1.0


def counts(lines: Sequence[Line]) -> str:
    """Lines, and how many of each verdict, as cells."""
    return " | ".join(str(n) for n in (len(lines), *(sum(each.verdict == v for each in lines) for v in (MATCH, DIFFERS, NOT_MEASURED))))


def worst(lines: Sequence[Line]) -> tuple[float, Line] | None:
    """The line that is furthest off; None where none differs."""
    peaks = {each.rank: each.measured for each in lines if each.quantity == "memory.peak" and each.measured}
    off = [(deviation(each, peaks), each) for each in lines if each.verdict == DIFFERS]
    return max(off, key=lambda item: item[0], default=None)


def of_ranks(line: Line) -> str:
    """The name of a line with its rank."""
    return f"`{line.quantity}`" + ("" if line.rank is None else f" of rank {line.rank}")


def figures(line: Line, off: float) -> str:
    """Predicted and measured, and how far apart."""
    shown = [f"{value:,.0f}" if line.unit != "share" else f"{value:.3f}" for value in (line.predicted, line.measured) if value is not None]
    unit = " bytes" if line.unit == "bytes" else ""
    share = f"{100 * off:.1f}% of the rank's peak" if line.quantity.startswith("memory.") else f"a factor of {1 + off:.2f}"
    return f"{shown[0]} predicted, {shown[1]}{unit} measured ({share})"


def row(name: str, lines: Sequence[Line]) -> str:
    """One recording."""
    ratios = [each.ratio for each in lines if each.quantity == "memory.peak" and each.ratio is not None]
    peak = f"{min(ratios):.3f} to {max(ratios):.3f}" if ratios else ""
    found = worst(lines)
    told = "" if found is None else f"{of_ranks(found[1])}: {figures(found[1], found[0])}: {found[1].why}"
    return f"| {name} | {counts(lines)} | {peak} | {told} |"


def main() -> None:
    """Print the document."""
    found: dict[str, list[Line]] = {}
    for folder in sorted(path for path in SAMPLES.iterdir() if any(path.glob("*.manifest.json"))):
        lines = comparison.analyze(load_job([str(folder)], LoadOptions(), analyses.reducers())).lines
        if lines:
            found[folder.name] = lines
    plain = {name: [each for each in lines if not _timed(each)] for name, lines in found.items()}
    times = {name: [each for each in lines if each.quantity.endswith(".time") and each.rank is None] for name, lines in found.items()}
    everything = [each for lines in plain.values() for each in lines]
    exact = [each for each in everything if each.verdict == MATCH and each.measured == each.predicted]
    print("# Predicted and measured\n")
    print(HEAD)
    match, differ, missing = (sum(each.verdict == verdict for each in everything) for verdict in (MATCH, DIFFERS, NOT_MEASURED))
    print(f"**{len(everything):,} lines: {match:,} match ({len(exact):,} of them exactly), {differ} differ, {missing} were not measured.**")
    print(f"{_worst_of_all(plain)}\n")
    print("| recording | lines | match | differ | not measured | peak, measured / predicted, over ranks | worst line |")
    print("|-|-|-|-|-|-|-|")
    for name, lines in plain.items():
        print(row(name, lines))
    print("\n## Times\n")
    print(TIMES)
    print("| recording | classes | match | differ | not measured | worst class, measured / predicted |")
    print("|-|-|-|-|-|-|")
    for name, lines in times.items():
        if any(each.quantity.startswith("collectives.") for each in lines):
            classes = [each for each in lines if each.quantity.startswith("collectives.")]
            bad = worst(classes)
            told = "" if bad is None or bad[1].ratio is None else f"`{bad[1].quantity}`: {bad[1].ratio:.2f}; {bad[1].why}"
            print(f"| {name} | {counts(classes)} | {told} |")


def _timed(line: Line) -> bool:
    return line.quantity.endswith(".time") or line.quantity.startswith("step.")


def _worst_of_all(found: dict[str, list[Line]]) -> str:
    """The worst line of memory and traffic, and the worst bubble, in words."""
    said = []
    for what, start in (("memory and traffic", ("memory.", "collectives.")), ("pipelines", ("pipeline.",))):
        candidates = [(item, name) for name, lines in found.items() if (item := worst(lines_of(lines, start))) is not None]
        if candidates:
            (off, line), name = max(candidates, key=lambda candidate: candidate[0][0])
            said.append(f"The worst line of {what} is {of_ranks(line)} in {name}: {figures(line, off)}: {line.why}.")
    return " ".join(said)


def lines_of(lines: Sequence[Line], starts: tuple[str, ...]) -> list[Line]:
    """Lines of some kinds, and the peaks that deviations are shares of."""
    return [each for each in lines if each.quantity.startswith(starts)]


if __name__ == "__main__":
    main()
