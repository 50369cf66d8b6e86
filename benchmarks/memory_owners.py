"""How often the owners of memory are right without a manifest, against what the recorder registered, on recordings that have both.

    python benchmarks/memory_owners.py RECORDING...          # folders of `tracekit record`

At the peak of every rank each block has two owners: by the manifest (grade a) and by the trace alone (grade c: enclosing ranges, phases,
lifetime). Rows are grade a, columns grade c, bytes in the cells. What a recording does not register has the same owner in both: record with
--saved-tensors, so that activations are registered too. Memory older than the recording that the trace does not show at all (on a
host the profiler does not count it) has no owner in grade c; it is told apart and not in the share.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import numpy as np

from tracekit.memory.attribution import Attributed, attribute_trace
from tracekit.memory.timeline import logs_of
from tracekit.readers.kineto import read_trace
from tracekit.readers.manifest import read_manifest
from tracekit.readers.sources import find_sources
from tracekit.trace.steps import find_phases, find_steps
from tracekit.units import format_bytes
from tracekit.vocabulary import CATEGORIES

UNSEEN = "(not in the trace)"


def confusion(with_manifest: Attributed, alone: Attributed) -> Counter[tuple[str, str]]:
    """(grade a, grade c) -> bytes at the peak of grade a."""
    code = np.full(len(alone.timeline.blocks), -1, np.int64)
    code[alone.ownership.block] = alone.ownership.category  # without a manifest a block is one row
    ownership = with_manifest.ownership
    live = ownership.live(with_manifest.timeline.peak())
    found: Counter[tuple[str, str]] = Counter()
    for block, category, size in zip(
        ownership.block[live].tolist(), ownership.category[live].tolist(), ownership.bytes[live].tolist(), strict=True
    ):
        seen = block < len(code) and code[block] >= 0
        found[CATEGORIES[category], CATEGORIES[code[block]] if seen else UNSEEN] += size
    return found


def of_recording(folder: str) -> Counter[tuple[str, str]]:
    """The confusion of all ranks and devices of one recording."""
    total: Counter[tuple[str, str]] = Counter()
    for source in find_sources([folder]).sources:
        manifest, problem = read_manifest(source)
        if manifest is None:
            raise SystemExit(f"{source.name}: {problem or 'no manifest beside it'}")
        tables = read_trace(source)
        phases, steps = find_phases(tables), find_steps(tables)
        for log, counters in logs_of(tables):
            told = attribute_trace(tables, log, counters, phases, steps, manifest.owners)
            total += confusion(told, attribute_trace(tables, log, counters, phases, steps, None))
    return total


def show(name: str, table: Counter[tuple[str, str]]) -> None:
    """Print one table with its share of bytes that are right."""
    seen = {pair: size for pair, size in table.items() if pair[1] != UNSEEN}
    right = sum(size for (truth, said), size in seen.items() if truth == said)
    total = sum(seen.values())
    print(f"\n{name}: {right / total:.2%} of {format_bytes(total)} right" if total else f"\n{name}: nothing to compare")
    rows = [c for c in CATEGORIES if any(truth == c for truth, _ in table)]
    columns = [c for c in (*CATEGORIES, UNSEEN) if any(said == c for _, said in table)]
    width = max(map(len, [*rows, *columns])) + 2
    print(" " * width + "".join(f"{column:>{width}}" for column in columns))
    for row in rows:
        cells = [format_bytes(table[row, column]) if table[row, column] else "-" for column in columns]
        print(f"{row:<{width}}" + "".join(f"{cell:>{width}}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", nargs="+")
    total: Counter[tuple[str, str]] = Counter()
    recordings = parser.parse_args().recordings
    for folder in recordings:
        found = of_recording(folder)
        show(Path(folder).name, found)
        total += found
    if len(recordings) > 1:
        show("all recordings", total)


if __name__ == "__main__":
    main()
