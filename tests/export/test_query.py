"""SQL over a job's tables: exact answers, and nothing that a statement can reach beside them."""

import json

import pandas as pd
import pytest
from click.testing import CliRunner

from tests.builder import Trace
from tracekit import analyses
from tracekit.cli.main import cli
from tracekit.errors import UsageError
from tracekit.export.query import Database, schema
from tracekit.export.tables import job_tables
from tracekit.job.load import LoadOptions, load_job

duckdb = pytest.importorskip("duckdb", reason="the extra query is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two steps: kernels of 10 and 20 us, a collective of 1,024 floats on a rank of two."""
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


@pytest.fixture(scope="module")
def tables(folder):
    job = load_job([str(folder)], LoadOptions(), analyses.reducers())
    return job_tables(job, analyses.run(job))


def test_an_answer_is_exact(tables):
    """Ring all-reduce of 4,096 B over two ranks: each sends 4,096 B, twice; sums of 64-bit integers stay whole."""
    with Database(tables) as database:
        found = database.ask("SELECT rank, sum(sent_bytes) AS sent, min(start_ns) AS first FROM operations GROUP BY rank ORDER BY rank")
    assert found["sent"].tolist() == [8192, 8192]
    assert (
        found["first"].dtype == "Int64" and found["first"].tolist() == tables["operations"].frame.groupby("rank")["start_ns"].min().tolist()
    )


def test_tables_can_be_joined(tables):
    statement = "SELECT o.rank FROM operations o JOIN matches m ON o.match = m.match WHERE m.seq = 2 ORDER BY 1"
    with Database(tables) as database:
        assert database.ask(statement)["rank"].tolist() == [0, 1]
        assert database.ask("SELECT count(*) AS n FROM steps WHERE step = 1")["n"].tolist() == [2]


def test_what_is_not_known_is_null(tables):
    with Database(tables) as database:
        assert database.ask("SELECT count(*) AS n FROM operations WHERE full_bytes < 0")["n"].tolist() == [0]


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT * FROM read_csv('{file}')",
        "SELECT * FROM read_text('{file}')",
        "SELECT * FROM '{file}'",
        "SELECT * FROM glob('/*')",
        "COPY operations TO '{out}'",
        "ATTACH '{out}' AS other",
        "EXPORT DATABASE '{out}'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET enable_external_access = true",
        "PRAGMA enable_profiling",
        "CREATE TABLE mine (a INT)",
        "DELETE FROM operations",
        "DROP VIEW operations",
        "CALL pragma_version()",
        "SELECT 1; COPY operations TO '{out}'",
        "SELECT * FROM tables",
        "SELECT getenv('HOME')",
        "not SQL",
        "",
    ],
)
def test_a_statement_reaches_nothing_but_the_tables(statement, tables, tmp_path):
    secret, out = tmp_path / "secret.csv", tmp_path / "out"
    secret.write_text("a\n1\n")
    with Database(tables) as database, pytest.raises(UsageError):
        database.ask(statement.format(file=secret, out=out))
    assert not out.exists()


def test_the_schema_documents_every_column_of_the_job(tables):
    frame = schema(tables)
    own = frame[frame["table"].isin(["operations", "matches", "ranks", "steps", "groups", "findings", "files", "breakdown_per_step"])]
    assert (own["meaning"] != "").all()
    assert set(frame["table"]) == set(tables)


def ask(folder, *arguments):
    return CliRunner().invoke(cli, ["query", "--no-cache", "-q", str(folder), *arguments])


def test_the_command_answers_in_every_form(folder, tmp_path):
    statement = "SELECT kind, count(*) AS calls, NULL AS nothing FROM operations GROUP BY kind"
    assert "all_reduce      4  –" in " ".join(ask(folder, statement).stdout.split("\n"))
    assert ask(folder, statement, "--format", "csv").stdout == "kind,calls,nothing\nall_reduce,4,\n"
    assert json.loads(ask(folder, statement, "--format", "json").stdout) == [{"kind": "all_reduce", "calls": 4, "nothing": None}]
    out = tmp_path / "calls.parquet"
    assert ask(folder, statement, "-o", str(out)).exit_code == 0
    assert pd.read_parquet(out)["calls"].tolist() == [4]


def test_the_command_names_its_tables(folder):
    done = ask(folder, "--schema", "--format", "csv")
    assert "operations,start_ns,int64,ns," in done.stdout


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["SELECT nope FROM operations"], "nope"),
        (["SELECT axs FROM operations"], 'Candidate bindings: "axis"'),
        (["FROM operation"], 'Did you mean "operations"?'),
        (["."], ". is a folder, and the last argument is the statement"),
        (["SELECT 1", "--format", "parquet"], "-o FILE"),
        (["SELECT 1; SELECT 2"], "2 statements"),
        (["--format", "table", "-o", "x.txt", "SELECT 1"], "a table is for the terminal"),
        ([], "give the traces"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(folder, arguments, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = ask(folder, *arguments)
    assert done.exit_code == 2 and reason in done.stderr
