"""Every event of every rank as a table of SQL, on the job's clock, read only when a statement asks for it."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from tests.builder import Trace
from tracekit.cli.main import cli
from tracekit.errors import UsageError
from tracekit.export import events
from tracekit.export.query import Database
from tracekit.job.load import LoadOptions, load_job

pytest.importorskip("duckdb", reason="the extra query is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two ranks, steps 1 and 2: a kernel of 10 and 20 us, launched before, and one collective a step."""
    found = tmp_path_factory.mktemp("job")
    for rank in (0, 1):
        trace = Trace(rank, 2)
        for step in (1, 2):
            at = 1000 * step
            trace.step(step, at, 900)
            trace.kernel("gemm", start=at + 10, dur=10 * step, launch=at + 1)
            trace.collective("allreduce", start=at + 100, dur=50, seq=step, launch=at + 50)
        trace.write(found / f"rank{rank}.json")
    return found


def ask(folder, statement, *arguments):
    done = CliRunner().invoke(cli, ["query", "--no-cache", "-q", "--format", "json", *arguments, str(folder), statement])
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def test_events_are_exact(folder):
    statement = "SELECT rank, step, dur_ns, start_ns - min(start_ns) OVER () AS at FROM events WHERE name = 'gemm' ORDER BY rank, step"
    rows = ask(folder, statement)
    assert [(row["rank"], row["step"], row["dur_ns"], row["at"]) for row in rows] == [
        (rank, step, step * 10_000, (step - 1) * 1_000_000) for rank in (0, 1) for step in (1, 2)
    ]


def test_every_event_of_the_files_is_there(folder):
    files = [json.loads((folder / f"rank{rank}.json").read_text())["traceEvents"] for rank in (0, 1)]
    written = [sum(event["ph"] not in ("M", "s", "t", "f") for event in file) for file in files]
    rows = ask(folder, "SELECT rank, count(*) AS n, count(DISTINCT event) AS kinds FROM events GROUP BY rank ORDER BY rank")
    assert [row["n"] for row in rows] == [row["kinds"] for row in rows] == written


def test_a_launch_is_found_by_its_correlation(folder):
    statement = """SELECT k.start_ns - h.start_ns AS delay FROM events k JOIN events h
        ON h.rank = k.rank AND h.correlation = k.correlation AND h.category = 'runtime' WHERE k.name = 'gemm'"""
    assert [row["delay"] for row in ask(folder, statement)] == [9_000] * 4


def test_communication_leads_to_its_operation(folder):
    statement = """SELECT o.kind, o.seq, o.rank = e.rank AS same, o.start_ns - e.start_ns AS apart, o.step_number - e.step AS steps
        FROM events e JOIN operations o ON o."window" = e."window" AND o.local = e.operation ORDER BY o.rank, o.seq"""
    found = ask(folder, statement)
    assert found == [{"kind": "all_reduce", "seq": seq, "same": True, "apart": 0, "steps": 0} for _ in (0, 1) for seq in (1, 2)]


def test_what_is_not_recorded_is_missing(folder):
    found = ask(folder, "SELECT DISTINCT device, stream, operation FROM events WHERE category = 'runtime'")
    assert found == [{"device": None, "stream": None, "operation": None}]


def test_of_chosen_steps_only_their_events_are_there(folder):
    assert [row["step"] for row in ask(folder, "SELECT DISTINCT step FROM events", "--steps", "2")] == [2]


def test_times_are_on_the_clock_of_the_job(folder, tmp_path, monkeypatch):
    """A clock that is ahead is put right batch by batch; a missing time stays missing."""
    monkeypatch.setattr(events, "BATCH", 3)
    job = load_job([str(folder)], LoadOptions(), {events.REDUCER: events.EventSpool(str(tmp_path))})
    job.clock.offset_ns[1] = 123
    frame = events.gathered(job, str(tmp_path)).to_table().to_pandas()
    apart = frame[frame["rank"] == 1]["start_ns"].to_numpy() - frame[frame["rank"] == 0]["start_ns"].to_numpy()
    assert np.abs(apart).tolist() == [123] * len(apart) and len(apart) > 3
    assert [path.name for path in tmp_path.iterdir()] == ["events.parquet"]


def test_a_statement_still_reaches_no_file(folder, tmp_path):
    job = load_job([str(folder)], LoadOptions(), {events.REDUCER: events.EventSpool(str(tmp_path))})
    with Database({}) as database:
        database.add("events", events.gathered(job, str(tmp_path)))
        assert database.ask("SELECT count(*) AS n FROM events")["n"][0] > 0
        with pytest.raises(UsageError):
            database.ask(f"SELECT * FROM read_parquet('{tmp_path}/events.parquet')")


def test_a_second_time_with_a_cache_gives_the_same(folder, tmp_path):
    """Scratch files of the first time are gone."""
    arguments = ["--cache", str(tmp_path / "cache"), "-q", str(folder)]
    for out in ("first.json", "second.json"):
        done = CliRunner().invoke(cli, ["export", *arguments, "-o", str(tmp_path / out)])
        assert done.exit_code == 0, done.stderr
    assert (tmp_path / "first.json").read_bytes() == (tmp_path / "second.json").read_bytes()
    told = [CliRunner().invoke(cli, ["query", *arguments, "--format", "csv", "SELECT count(*) AS n FROM events"]).stdout for _ in (1, 2)]
    assert told[0] == told[1] and int(told[0].split()[1]) > 10


def test_other_statements_do_not_pay_for_it(folder, monkeypatch):
    def refuse(*_):
        raise AssertionError("events were put aside")

    monkeypatch.setattr(events.EventSpool, "__call__", refuse)
    assert ask(folder, "SELECT count(*) AS n FROM operations") == [{"n": 4}]


def test_the_schema_documents_it(folder):
    done = CliRunner().invoke(cli, ["query", "--no-cache", "-q", "--schema", "--format", "csv", str(folder)])
    lines = [line for line in done.stdout.splitlines() if line.startswith("events,")]
    assert len(lines) == len(events.EVENTS.columns) and all(line.rstrip(",").count(",") >= 4 for line in lines)
