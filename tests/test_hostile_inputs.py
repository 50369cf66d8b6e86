"""Numbers that no machine can hold and files that are no files, wherever a trace, manifest or plan may have them: told, never built."""

import json
import os
import signal

import pytest
from click.testing import CliRunner

from tests.builder import Trace
from tracekit.cli.main import cli
from tracekit.errors import InputError
from tracekit.manifest import decode

NUMBERS = [
    "1e30000000", "-1e30000000", '"1e30000000"', "1e999", "-1e29", "1e29", "123456789012345678901234567890", "9" * 5000, "-1e-30000000",
    "1e22", "-9223372036854775808", "9223372036854775808", "NaN", "-Infinity", '"inf"', "[[1e400]]", '{"a": -1e300}', "true", "null",
]  # fmt: skip


@pytest.fixture(autouse=True)
def in_time():
    """A hang is a failure of the test, not of the run."""

    def expired(*_):
        raise AssertionError("it took more than a minute")

    before = signal.signal(signal.SIGALRM, expired)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def trace():
    made = Trace(0, 1)
    made.step(1, 0, 1000)
    made.kernel("gemm", 60, 100, launch=20, op="aten::mm")
    return json.dumps(made.document())


def analyzed(path):
    return CliRunner().invoke(cli, ["analyze", str(path), "--no-report", "--no-cache"])


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(
    "key", ["baseTimeNanoseconds", "schemaVersion", "deviceProperties", "distributedInfo", "record_shapes", "unheard_of"]
)
def test_numbers_of_a_trace(tmp_path, key, number):
    (tmp_path / "rank0.json").write_text(f'{{"{key}": {number}, ' + trace().lstrip()[1:])
    result = analyzed(tmp_path)
    assert result.exit_code == 0, result.output
    assert "internal error" not in result.output


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("key", ["rank", "world_size", "pg_count"])
def test_numbers_of_a_trace_about_its_job(tmp_path, key, number):
    other = {"rank": "world_size", "world_size": "rank", "pg_count": "rank"}[key]
    info = f'{{"{key}": {number}, "{other}": 1, "pg_config": [{{"pg_name": {number}, "pg_size": {number}, "ranks": [{number}]}}]}}'
    (tmp_path / "rank0.json").write_text(f'{{"distributedInfo": {info}, ' + trace().lstrip()[1:])
    result = analyzed(tmp_path)
    assert result.exit_code in (0, 2), result.output
    assert "internal error" not in result.output


MANIFEST = {"rank": 0, "world_size": 2, "groups": [{"name": "0", "ranks": [0, 1]}]}


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 2**64, 10**30, 1e300])
def test_numbers_of_a_manifest(number):
    parts = {
        "world_size": {"world_size": number},
        "mesh": {"mesh": [{"name": "tp", "size": number}]},
        "calls": {"calls": {name: [number] for name in ("time_ns", "group", "seq", "name", "peer", "elements_in", "elements_out")}},
        "owners": {"owners": {name: [number] for name in ("time_ns", "address", "bytes", "category", "name", "unit")}},
        "parameters": {"parameters": [{"name": "w", "shape": [number], "dtype": "float32", "address": number, "bytes": number}]},
        "units": {"units": [{"name": "u", "parameters": ["w"], "elements": number, "padded_elements": number}]},
        "batch": {"batch": {"global_batch": number, "sequence": number}},
        "groups": {"groups": [{"name": "0", "ranks": [0, number]}]},
    }
    for part in parts.values():
        with pytest.raises(InputError, match="is no manifest"):
            decode(json.dumps({**MANIFEST, **part}).encode(), "m.json")


@pytest.mark.parametrize("name", ["rank_00000.manifest.json", "rank_00000.memory_snapshot.pickle", "rank_00001.pt.trace.json"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_no_file_is_not_waited_for(tmp_path, name, kind):
    (tmp_path / "rank_00000.pt.trace.json").write_text(trace())
    if kind == "pipe":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).symlink_to("/dev/zero")
    result = analyzed(tmp_path)
    assert result.exit_code == 0, result.output
    assert "gemm" in result.output


def test_a_plan_that_is_no_file_is_one_line(tmp_path):
    os.mkfifo(tmp_path / "plan.yaml")
    result = CliRunner().invoke(cli, ["estimate", str(tmp_path / "plan.yaml")])
    assert result.exit_code == 2
    assert "plan.yaml" in result.output
