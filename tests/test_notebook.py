"""The notebook of the documents runs as it stands, from a fresh kernel, without an output of an earlier run in it."""

import warnings
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).resolve().parents[1] / "docs" / "notebook.ipynb"


def read():
    nbformat = pytest.importorskip("nbformat")
    return nbformat.read(NOTEBOOK, as_version=4)


def test_no_output_is_kept():
    assert all(not cell.outputs and cell.execution_count is None for cell in read().cells if cell.cell_type == "code")


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("duckdb")
    monkeypatch.setenv("TRACEKIT_CACHE", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = read()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the kernel's own libraries
        nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    shown = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not any(output.output_type == "error" for output in shown)
    assert sum("application/vnd.plotly.v1+json" in output.get("data", {}) for output in shown) == 2
    assert any("tracekit job: 8 of 8 ranks" in str(output.get("data", {}).get("text/html", "")) for output in shown)
