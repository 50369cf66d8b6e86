import json
import math

import numpy as np
import pandas as pd
import pytest

from tests.report.example import Given, breakdown, job
from tracekit.findings import Finding
from tracekit.report.document import ANALYSIS_KEYS, clean, document
from tracekit.report.encoding import encode
from tracekit.trace.clock import Clock
from tracekit.units import NULL


def test_the_job() -> None:
    found = document(job(clock=Clock(True, {0: 0, 1: 812_000}, 1_200)), {})
    assert found["schema_version"] == 1
    assert found["job"] == {
        "world_size": 2,
        "ranks": [0, 1],
        "missing_ranks": [],
        "backend": "nccl",
        "device": "NVIDIA H100 80GB HBM3",
        "nodes": None,
        "steps": [10, 11],
        "mesh": {"axes": [{"name": "tp", "size": 2}], "source": "descriptions", "coordinates": {"0": [0], "1": [1]}},
        "clock": {"aligned": True, "offset_us": {"0": 0.0, "1": 812.0}, "drift_ppm": {}, "residual_us": 1.2, "note": None},
        "time_zero_unix_ns": None,
    }
    assert found["coverage"][0] == {
        "file": "runs/a/rank0.json",
        "rank": 0,
        "status": "complete",
        "events": 40,
        "arrows": 7,
        "problems": [],
    }


def test_what_no_analysis_gave_is_null_with_a_reason() -> None:
    found = document(job(), {"breakdown": Given(json={"breakdown": breakdown()})})
    assert len(found["breakdown"]) == 4
    for key in set(ANALYSIS_KEYS) - {"breakdown"}:
        assert found[key] is None
        assert found["not_measured"][key]
    assert "breakdown" not in found["not_measured"]


def test_an_analysis_can_say_why_something_is_missing() -> None:
    results = {"memory": Given(json={"memory": None, "not_measured": {"memory": "no [memory] events"}})}
    assert document(job(), results)["not_measured"]["memory"] == "no [memory] events"


@pytest.mark.parametrize("key", ["collectives", "job"])
def test_a_key_given_twice_is_an_error(key: str) -> None:
    results = {"a": Given(json={"collectives": []}), "b": Given(json={key: []})}
    with pytest.raises(ValueError, match=f"b gives the key '{key}'"):
        document(job(), results)


def test_findings_are_ranked_over_all_analyses() -> None:
    results = {
        "a": Given([Finding("a.small", "warning", "", weight_ns=1_000), Finding("a.note", "info", "", weight_ns=9_000)]),
        "b": Given([Finding("b.large", "warning", "", weight_ns=5_000), Finding("b.worst", "critical", "", value=math.nan)]),
    }
    found = document(job(), results)["findings"]
    assert [finding["id"] for finding in found] == ["b.worst", "b.large", "a.small", "a.note"]
    assert found[0]["value"] is None
    assert found[1]["weight_us"] == 5.0


def test_values_become_json() -> None:
    given = {
        "numpy": np.int64(3),
        7: (np.float32(0.5), np.bool_(True)),
        "null": [NULL, math.nan, math.inf, pd.NA, None],
        "array": np.array([1, NULL]),
        "text": "half \ud83d",
    }
    assert clean(given) == {
        "numpy": 3,
        "7": [0.5, True],
        "null": [None] * 5,
        "array": [1, None],
        "text": "half \ufffd",
    }
    with pytest.raises(TypeError, match="object cannot stand in JSON"):
        clean(object())


def test_json_is_strict_utf8_whatever_the_names() -> None:
    results = {"x": Given(json={"kernels": [{"name": "half \ud83d", "us": math.nan}]})}
    data = encode(document(job(), results), indent=1)
    found = json.loads(data.decode("utf-8"), parse_constant=pytest.fail)
    assert found["kernels"] == [{"name": "half \ufffd", "us": None}]


def test_operations() -> None:
    found = document(job(), {}, operations=True)["operations"]
    assert found == [
        {
            "group": "3@0,1",
            "kind": "all_reduce",
            "seq": 7,
            "step": 10,
            "ranks": {"0": {"start_us": 1000.0, "end_us": 1500.0}, "1": {"start_us": 1300.0, "end_us": 1500.0}},
            "last_rank": 1,
            "skew_us": 300.0,
            "transfer_us": 200.0,
            "complete": True,
            "matched_by": "seq",
        }
    ]
    assert "operations" not in document(job(), {})
