"""tracekit in Python: tables, analyses, figures, notebooks."""

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import tracekit
from tests.builder import Trace
from tracekit import api
from tracekit.errors import InputError, UsageError

SAMPLES = Path(__file__).resolve().parents[1] / "sample_traces"


@pytest.fixture(scope="module")
def job():
    return tracekit.load(SAMPLES / "hybrid_3d_8", cache=False)


def test_a_job_is_what_the_command_reads(job):
    assert job.ranks == list(range(8)) and job.world_size == 8
    assert [axis.name for axis in job.mesh.axes] == ["pp", "dp_shard", "tp"]
    assert set(job.operations["axis"]) == {"pp", "dp_shard", "tp"}
    assert job.json()["job"]["ranks"] == job.ranks
    assert [one["text"] for one in job.json()["findings"]] == job.findings["text"].tolist()


def test_every_table_is_there_by_name_and_documented(job):
    for name, about in job.tables.items():
        frame, columns = job.table(name), job.columns(name)
        assert about and columns["column"].tolist() == list(frame.columns), name
    with pytest.raises(UsageError, match="no table 'nothing'"):
        job.table("nothing")


def test_a_table_is_a_copy(job):
    frame = job.operations
    frame["rank"] = 99
    assert job.operations["rank"].max() == 7


def test_every_analysis_is_a_function(job):
    for name in api.names():
        found = job.analysis(name)
        assert isinstance(found.json, dict) and isinstance(found.findings, pd.DataFrame), name
        if hasattr(job, name) and name not in ("timeline", "coverage", "process_groups"):
            assert getattr(job, name)().name == name
    with pytest.raises(UsageError, match="no analysis called"):
        job.analysis("nothing")


def test_figures_are_plotly_figures_with_titles(job):
    graph_objects = pytest.importorskip("plotly.graph_objects")
    figures = job.breakdown().figures()
    assert figures and all(isinstance(one, graph_objects.Figure) and one.layout.title.text for one in figures)


def test_tables_for_readers_have_headings_with_units(job):
    assert any("[us]" in heading for frame in job.breakdown().shown().values() for heading in frame.columns)


def test_sql_is_answered(job):
    pytest.importorskip("duckdb")
    assert job.sql("SELECT count(DISTINCT rank) AS n FROM operations")["n"].tolist() == [8]


def test_a_notebook_shows_names_as_text(tmp_path):
    trace = Trace(0, 1)
    trace.step(1, 0, 1000)
    trace.kernel("<script>alert(1)</script>", start=10, dur=900)
    trace.write(tmp_path / "rank0.json")
    job = tracekit.load(tmp_path, cache=False)
    shown = job._repr_html_() + job.kernels()._repr_html_()
    assert "1 of 1 ranks" in shown and "<script>" not in shown
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in shown
    assert repr(job.kernels()).startswith("<kernels: 1 tables")


def test_options_are_those_of_the_command():
    job = tracekit.load(SAMPLES / "hybrid_3d_8", ranks=[0, 1], cache=False)
    assert job.ranks == [0, 1]
    with pytest.raises(InputError):
        tracekit.load(SAMPLES / "no such folder", cache=False)


def test_the_report_is_written(job, tmp_path):
    job.report(tmp_path / "job.html")
    assert "<html" in (tmp_path / "job.html").read_text()[:2000]


def test_plotly_and_duckdb_wait_until_they_are_asked_for():
    code = "import sys, tracekit.api; print(sorted({'plotly', 'duckdb', 'torch', 'click', 'hta'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
