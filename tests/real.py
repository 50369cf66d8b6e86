"""Traces of real jobs that lie beside the project (not in it); tests on them are skipped where they are absent."""

from pathlib import Path

SHARED = Path(__file__).resolve().parents[2] / "shared"
REAL = SHARED / "real"
CASES = SHARED / "cases"


def real_traces():
    """Every Kineto trace there is; an empty list where the folder is absent."""
    single = [p for p in sorted(REAL.glob("*.json.gz")) if "timeline" not in p.name]
    return [*single, *sorted((REAL / "dlrm_v100_8ranks").glob("*.json"))[:1]]
