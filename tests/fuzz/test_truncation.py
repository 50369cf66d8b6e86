"""Cut at every byte, a file gives what stands before the cut, or is refused in one line."""

import gzip
import io
import json
import pickle

import pytest
import zstandard

from tests.analyses.hang.made import RankDump
from tests.builder import Trace
from tests.fuzz.targets import SAMPLES, _snapshot
from tests.readers.made import read, texts
from tracekit.errors import InputError
from tracekit.manifest import decode
from tracekit.readers import memory_snapshot_child, plain_pickle
from tracekit.readers.flight_recorder import read_dump
from tracekit.readers.sources import Source

pytestmark = pytest.mark.slow


def text_of_a_trace():
    trace = Trace(0, 1)
    trace.step(1, 1000, 900)
    trace.kernel("gemm", 1060, 100, launch=1020, op="aten::mm")
    return json.dumps(trace.document(), separators=(",", ":")).encode()


def refused(error):
    assert "\n" not in str(error)
    return str(error)


def test_a_trace():
    text = text_of_a_trace()
    whole = read(text, threads=1)
    names, stamps = texts(whole, whole.name), whole.ts.tolist()
    most = 0
    for cut in range(len(text)):
        try:
            tables = read(text[:cut], threads=1, chunk=1 << 12)
        except InputError as error:
            assert most == 0 and ("truncated" in refused(error) or cut < 3), cut
            continue
        got = texts(tables, tables.name)
        assert got == names[: len(got)]
        assert len(got) >= most
        assert tables.coverage.status == "truncated" or len(got) == len(names)
        most = len(got)
    assert most == len(stamps)


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.ZstdCompressor().compress], ids=["gzip", "zstd"])
def test_a_packed_trace(pack):
    packed = pack(text_of_a_trace())
    for cut in range(len(packed)):
        try:
            tables = read(packed[:cut], threads=1, chunk=1 << 12)
        except InputError as error:
            refused(error)
        else:
            assert len(tables) and tables.coverage.problems, cut


def test_a_manifest():
    text = (SAMPLES / "fsdp2_2" / "rank_00000.manifest.json").read_bytes().rstrip()
    decode(text, "manifest.json")
    for cut in range(len(text)):
        with pytest.raises(InputError) as error:
            decode(text[:cut], "manifest.json")
        refused(error.value)


def test_a_snapshot():
    data = pickle.dumps(_snapshot(), protocol=4)
    memory_snapshot_child.Columns(plain_pickle.PlainUnpickler(io.BytesIO(data)).load())
    for cut in range(len(data)):
        with pytest.raises((EOFError, *plain_pickle.DAMAGED)):
            plain_pickle.PlainUnpickler(io.BytesIO(data[:cut])).load()


@pytest.mark.parametrize("name", ["rank_0", "rank_0.json"])
def test_a_dump_of_the_flight_recorder(tmp_path, name):
    path = tmp_path / name
    RankDump().call().write(path)
    data = path.read_bytes()
    for cut in range(len(data)):
        path.write_bytes(data[:cut])
        with pytest.raises(InputError) as error:
            read_dump(Source(str(path), name, cut, 1))
        refused(error.value)
