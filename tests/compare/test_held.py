"""Two snapshots of a rank compared: what is new, gone, larger; and peaks that are lower bounds."""

import json
import pickle
from dataclasses import replace

import msgspec
from click.testing import CliRunner

from tests.compare.made import run
from tests.memory.made import entry, segment, snapshot
from tracekit.cli.main import cli
from tracekit.compare.changes import compare
from tracekit.compare.held import Held
from tracekit.compare.words import sizes

A, T = 0x7F0000000000, 1_700_000_000_000_000


def dump(folder, blocks):
    """A snapshot of rank 0 in which these lines of code hold so many blocks of 1,024 bytes."""
    events, at = [entry("segment_alloc", T, 1 << 16, A)], A
    for line, count in blocks.items():
        for _ in range(count):
            events.append(entry("alloc", T + len(events), 1024, at, [("/job/train.py", line, "log")]))
            at += 1024
    folder.mkdir()
    parts = [(1024, "active_allocated")] * (len(events) - 1)
    state = segment(A, 1 << 16, [*parts, ((1 << 16) - 1024 * len(parts), "inactive")])
    (folder / "rank0_memory_snapshot.pickle").write_bytes(pickle.dumps(snapshot([events], [state])))
    return str(folder)


def test_snapshots_tell_what_is_new_gone_and_larger(tmp_path):
    base, new = dump(tmp_path / "base", {7: 1, 8: 2}), dump(tmp_path / "new", {7: 4, 9: 2, 10: 1})
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    said = CliRunner().invoke(cli, ["compare", base, new, "--json", str(out), "-o", str(page), "--no-cache"])
    assert said.exit_code == 0, said.output
    owners = json.loads(out.read_text())["owners"]
    assert [(o["rank"], o["device"], o["kind"], o["name"], o["base_bytes"], o["new_bytes"]) for o in owners] == [
        (0, "cuda:0", "larger", "train.py:7 log", 1024, 4096),
        (0, "cuda:0", "gone", "train.py:8 log", 2048, 0),
        (0, "cuda:0", "new", "train.py:9 log", 0, 2048),
        (0, "cuda:0", "new", "train.py:10 log", 0, 1024),
    ]
    assert "Owners of memory at the end of the snapshots" in said.stdout
    assert "train.py:9 log" in said.stdout
    assert "Owners of memory at the end of the snapshots" in page.read_text()


def test_a_snapshot_against_none_and_other_devices_tell_nothing():
    held = [Held(0, "cuda:0", [("activations", "", "x", 5)])]
    base, other = (replaced(run(memory={"peak": [5, 5]}), held=found) for found in (held, [Held(0, "cuda:1", held[0].owners)]))
    assert compare([base], [replaced(base, held=[])]).owners == []
    assert compare([base], [other]).owners == []
    assert compare([base], [base]).owners == []


def test_a_peak_that_is_a_lower_bound_is_said_to_be_one():
    base = run(memory={"peak": [1000, 2000], "parameters": [10, 10]})
    comparison = compare([replaced(base, at_least=[1])], [run(memory={"peak": [1000, 3000], "parameters": [10, 10]})])
    assert sizes(comparison.by_key()["memory.peak"]) == "at least 2 kB -> 3 kB (+50%)"
    assert "at least" not in sizes(comparison.by_key()["memory.parameters"])
    (note,) = comparison.alignment.notes
    assert note.startswith("peak memory of rank 1 in BASE is at least what is shown")
    assert comparison.by_key()["memory.peak"] == replace(comparison.by_key()["memory.peak"], at_least=("BASE",))


def replaced(of, **fields):
    return msgspec.structs.replace(of, **fields)
