"""Tables as files: what is not known is missing, names stay text, every column is documented."""

import pandas as pd
import pytest
from click.testing import CliRunner

from tests.builder import Trace
from tests.export.test_perfetto import SAMPLES, export
from tracekit import analyses
from tracekit.cli.main import cli
from tracekit.export.tables import job_tables
from tracekit.job.load import LoadOptions, load_job
from tracekit.units import NULL


@pytest.fixture(scope="module")
def tables():
    job = load_job([str(SAMPLES / "fsdp2_2")], LoadOptions(), analyses.reducers())
    return job_tables(job, analyses.run(job))


def test_every_table_says_what_a_row_is_and_what_every_column_means(tables):
    assert {
        "operations",
        "matches",
        "ranks",
        "steps",
        "groups",
        "process_groups",
        "memory_peaks",
        "findings",
        "files",
        "breakdown_per_step",
    } <= set(tables)
    for table in tables.values():
        assert table.about, table.name
        assert [column.name for column in table.columns] == list(table.frame.columns)


def test_nothing_unknown_is_a_number(tables):
    for table in tables.values():
        for name in table.frame.columns:
            if pd.api.types.is_integer_dtype(table.frame[name].dtype):
                assert not (table.frame[name] == NULL).any(), (table.name, name)


def test_parts_of_a_step_add_up(tables):
    frame = tables["breakdown_per_step"].frame
    assert len(frame)
    assert (frame[["compute_ns", "exposed_comm_ns", "exposed_copy_ns", "idle_ns"]].sum(axis=1) == frame["step_ns"]).all()


def test_a_table_reads_back_as_it_was(tables, tmp_path):
    for suffix, read in ((".parquet", pd.read_parquet), (".csv", pd.read_csv)):
        out = tmp_path / f"operations{suffix}"
        export(SAMPLES / "fsdp2_2", "--table", "operations", "-o", out, "-q")
        frame = read(out)
        assert frame["start_ns"].tolist() == tables["operations"].frame["start_ns"].tolist()
        assert frame["kind"].tolist() == tables["operations"].frame["kind"].tolist()


def test_a_workbook_has_a_sheet_a_table_and_no_formulas(tmp_path):
    openpyxl = pytest.importorskip("openpyxl")
    pytest.importorskip("xlsxwriter")
    trace = Trace(0, 1)
    trace.step(1, 0, 100)
    trace.kernel("=HYPERLINK(1)", start=10, dur=5)
    trace.write(tmp_path / "rank0.json")
    out = tmp_path / "job.xlsx"
    export(tmp_path / "rank0.json", "--table", "kernels", "--table", "steps", "-o", out, "-q")
    book = openpyxl.load_workbook(out)
    assert book.sheetnames == ["kernels", "steps"]
    cells = [cell for row in book["kernels"].iter_rows() for cell in row if cell.value == "=HYPERLINK(1)"]
    assert [cell.data_type for cell in cells] == ["s"]
    starts = [row[3].value for row in list(book["steps"].iter_rows())[1:]]
    assert starts == ["1775078550000000000"], "19 digits, all of them"


def test_a_spreadsheet_runs_no_name_of_a_csv(tmp_path):
    trace = Trace(0, 1)
    trace.step(1, 0, 100)
    trace.kernel("=cmd|' /C calc'!A0", start=10, dur=5)
    trace.write(tmp_path / "rank0.json")
    out = tmp_path / "kernels.csv"
    export(tmp_path / "rank0.json", "--table", "kernels", "-o", out, "-q")
    assert "\n'=cmd" in out.read_text()


def test_tables_are_listed():
    done = CliRunner().invoke(cli, ["export", str(SAMPLES / "fsdp2_2"), "--list", "--no-cache", "-q"])
    assert done.exit_code == 0
    assert "operations" in done.stdout and "rows" in done.stdout
