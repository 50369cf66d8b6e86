"""A shell may close standard output or standard error before the command starts (``>&-``)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.builder import Trace
from tracekit.report.coverage import common_folder


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_closed_stream_is_no_error(tmp_path: Path, closed: str) -> None:
    trace = Trace(rank=0)
    trace.step(1, 0, 1000)
    trace.kernel("gemm", start=100, dur=200, launch=50)
    path = trace.write(tmp_path / "rank0.json")
    command = f"'{sys.executable}' -m tracekit analyze '{path}' --no-report --no-cache --json '{tmp_path}/out.json' {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    assert (tmp_path / "out.json").exists()


def test_a_bare_name_shares_no_folder_with_a_whole_path() -> None:
    assert common_folder(["/tmp/t/rank0.json", "rank1.json"]) == ""
    assert common_folder(["/tmp/t/rank0.json", "/tmp/t/rank1.json"]) == "/tmp/t/"
