"""docs/json.md names every key that `tracekit analyze --json` writes."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SAMPLE = ROOT / "sample_traces" / "ddp_gloo_2ranks"


def _keys(value: Any) -> Iterator[str]:
    """Keys of objects at any depth; ranks and kinds of work that stand as keys, and keys of not_measured, are data."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not key.isdigit():
                yield key
            if key not in ("not_measured", "by_type"):
                yield from _keys(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _keys(inner)


def test_every_key_of_the_json_is_documented():
    command = [sys.executable, "-m", "tracekit", "analyze", str(SAMPLE), "--no-report", "--no-cache", "--operations", "-q", "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    keys = set(_keys(json.loads(done.stdout)))
    assert {"breakdown", "exposed_comm_us", "last_rank"} <= keys  # the sample has what this test is about
    documented = set(re.findall(r"[a-z_0-9]+", " ".join(re.findall(r"`([^`]+)`", (ROOT / "docs" / "json.md").read_text()))))
    assert keys - documented == set()


def test_tables_of_columns_follow_the_program():
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "columns.py"), "--check"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (0, "")
