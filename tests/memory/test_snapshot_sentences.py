"""What is said of snapshots that tell little: no history, one that cannot be used, no owners but lines of code."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest

from tests.memory.made import MB, entry, segment
from tracekit.analyses.memory import analyze
from tracekit.job.load import LoadOptions, load_job
from tracekit.notes import sentences
from tracekit.report.document import document
from tracekit.report.overview import answer

LINE = (("train.py", 10, "layer{0}"),)
WHOLE: dict[str, Any] = {
    "segments": [segment(1 << 20, 20 * MB, [(5 * MB, "active_allocated"), (15 * MB, "inactive")])],
    "device_traces": [
        [
            entry("segment_alloc", 1, 20 * MB, 1 << 20),
            entry("alloc", 2, 5 * MB, 1 << 20, LINE),
            entry("alloc", 3, 4 * MB, 9 << 20, LINE),
            entry("free_completed", 4, 4 * MB, 9 << 20),
        ]
    ],
}


def told(folder: Path, snapshot: dict[str, Any]) -> tuple[str, list[str], list[str]]:
    """(the answer, what is noted of the file, the texts of memory's findings)."""
    (folder / "rank0_snapshot.pickle").write_bytes(pickle.dumps(snapshot))
    job = load_job([str(folder)], LoadOptions())
    result = analyze(job)
    written = document(job, {"memory": result})
    return answer(written).sentence, [text for one in job.coverage for text in sentences(one.notes)], [f.text for f in result.findings()]


def test_what_has_no_owner_is_named_by_its_line(tmp_path: Path) -> None:
    sentence, _, findings = told(tmp_path, WHOLE)
    assert sentence == "Memory peaks at 9 MB on rank 0 (cuda:0), 100% of it allocated at train.py:10 layer{0}."
    assert "Nothing says what 9 MB at the peak of rank 0 (cuda:0) (100% of it) are; allocated at train.py:10 layer{0} (9 MB)." in findings


@pytest.mark.parametrize(
    ("change", "why"),
    [({}, "nothing of the history could be used"), ({"device_traces": [[]]}, "the history was not recorded")],
)
def test_without_a_history_the_end_is_told_and_why(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    snapshot = copy.deepcopy(WHOLE)
    for row in snapshot["device_traces"][0]:
        row["size"] = str(row["size"])
    sentence, notes, _ = told(tmp_path, {**snapshot, **change})
    assert sentence == "At the end 5 MB of 20 MB reserved are allocated on rank 0 (cuda:0); the peak is not known."
    assert any(text.startswith(why) for text in notes)
