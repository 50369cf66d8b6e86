"""Baselines, thresholds and histories as files: what comes back, and how a wrong one is refused."""

import json

import msgspec
import pytest

from tests.compare.made import run
from tracekit.checks import history
from tracekit.checks.baseline import SCHEMA_VERSION, baseline_of, decode, encode, read_baseline
from tracekit.checks.thresholds import Threshold, read_thresholds
from tracekit.compare.changes import compare
from tracekit.errors import InputError


def made(**other):
    return {**msgspec.to_builtins(baseline_of([run({"step.time": [1.0] * 6})], {"step.*": 0.1})), **other}


def test_a_baseline_comes_back_and_has_a_line_a_quantity():
    baseline = baseline_of([run({"step.time": [1.5] * 6, "step.idle": [None] * 6}), run()], {"step.*": "ignore"})
    data = encode(baseline)
    assert decode(data, "b.json") == baseline
    assert sum(b'"key":"step.time"' in line for line in data.splitlines()) == 1


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (json.dumps(made(schema_version=SCHEMA_VERSION + 1)), "schema version 2"),
        (json.dumps(made(schema_version="<b>")), "schema version <b>"),
        (json.dumps(made(format="other")), "no baseline"),
        (json.dumps(made(runs=[])), "no recording"),
        (json.dumps(made(runs=[{"name": 3}])), "cannot be read as a baseline"),
        ("[" * 100_000, "cannot be read as a baseline"),
        ("\xff", "cannot be read as a baseline"),
        ("{}", "no baseline"),
    ],
)
def test_what_is_no_baseline_is_refused_in_a_line(data, said):
    with pytest.raises(InputError, match=r"b\.json") as refused:
        decode(data.encode("latin-1"), "b.json")
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("values", [[1.0] * 5, [1.0] * 5 + [1e300]])
def test_values_have_to_fit_their_places(values):
    wrong = made()
    wrong["runs"][0]["quantities"][0]["values"] = values
    with pytest.raises(InputError, match=r"step\.time"):
        decode(json.dumps(wrong).encode(), "b.json")


def test_a_missing_baseline_is_one_line(tmp_path):
    with pytest.raises(InputError, match="No such file"):
        read_baseline(str(tmp_path / "none.json"))


def test_thresholds_in_toml(tmp_path):
    file = tmp_path / "gate.toml"
    file.write_text(
        '[thresholds]\n"step.time" = 0.03\n"a.*" = "2%"\n"b" = "exact"\n"c" = "ignore"\n"d" = { limit = "5%", direction = "both" }\n'
    )
    expected = [
        Threshold("step.time", 0.03),
        Threshold("a.*", 0.02),
        Threshold("b", 0.0),
        Threshold("c", None),
        Threshold("d", 0.05, "both"),
    ]
    assert read_thresholds(str(file)) == expected


@pytest.mark.parametrize(
    "text", ["", "[thresholds", '[thresholds]\na = "much"', "[thresholds]\na = -1", "[thresholds]\na = true", "[thresholds]\na = inf"]
)
def test_thresholds_that_are_none_are_refused(text, tmp_path):
    file = tmp_path / "gate.toml"
    file.write_text(text)
    with pytest.raises(InputError, match="gate"):
        read_thresholds(str(file))


@pytest.mark.parametrize("name", ["history.jsonl", "history.parquet"])
def test_a_history_grows_by_a_check(name, tmp_path):
    file = tmp_path / name
    changes = compare([run({"step.time": [1.0] * 6})], [run({"step.time": [2.0] * 6, "operator.mm.time": [1.0] * 6})]).changes
    for number in range(3):
        added = history.entry(changes, time=100.0 + number, name="run", commit="abc", outcome="passed")
        file.write_bytes(history.encode(str(file), added))
    found = history.read(str(file))
    assert [(one.time_unix_s, one.values, one.units) for one in found] == [
        (100.0 + n, {"step.time": 2.0}, {"step.time": "us"}) for n in range(3)
    ]


@pytest.mark.parametrize("name", ["history.jsonl", "history.parquet"])
def test_what_is_no_history_is_refused_and_kept(name, tmp_path):
    file = tmp_path / name
    file.write_bytes(b"PAR1 not really")
    with pytest.raises(InputError, match="no history"):
        history.read(str(file))
