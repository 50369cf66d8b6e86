"""What is fuzzed: for each kind of input seeds, and a function that must give an answer or refuse in one line (TracekitError)."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import pickle
import random
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard

from tests.analyses.hang.made import STARTED, RankDump
from tests.builder import Trace, group
from tests.fuzz import mutate
from tracekit import analyses
from tracekit.analyses.hang import analyze as analyze_hang
from tracekit.checks import baseline
from tracekit.cli.estimate import read_file
from tracekit.compare.figures import of_document
from tracekit.errors import TracekitError
from tracekit.estimate.spec import spec_of
from tracekit.job import window_cache
from tracekit.job.load import LoadOptions, load_job
from tracekit.job.window import Task, read_window
from tracekit.manifest import decode
from tracekit.readers import cache, memory_snapshot_child, plain_pickle
from tracekit.readers.kineto import read_trace
from tracekit.readers.memory_snapshot import read_snapshot
from tracekit.readers.sources import Source
from tracekit.report.document import document
from tracekit.report.encoding import encode

SAMPLES = Path(__file__).resolve().parents[2] / "sample_traces"


@dataclass(frozen=True)
class Target:
    """``make`` gives one input; ``run`` takes it, and a scratch folder. It returns or raises TracekitError: anything else is a fault."""

    make: Callable[[random.Random], bytes]
    run: Callable[[bytes, Path], None]


# Seeds ---------------------------------------------------------------------------------------------------------------


def _trace() -> dict[str, Any]:
    trace = Trace(0, 2, groups=[group("0", "default_pg", [0, 1])])
    for step in (1, 2):
        at = 1000 * step
        trace.step(step, at, 900)
        trace.kernel("gemm", at + 60, 100, launch=at + 20, op="aten::mm")
        trace.collective("allreduce", at + 300, 200, elements=1000, launch=at + 200, seq=step, ranks=[0, 1])
        trace.add(None, "[memory]", at + 5, **{"Bytes": 64, "Addr": 4096, "Total Allocated": 64, "Device Type": 1, "Device Id": 0})
    found: dict[str, Any] = trace.document()
    return found


def _snapshot() -> dict[str, Any]:
    frames = [{"filename": "train.py", "name": "step", "line": 3}]
    block = {"size": 1024, "requested_size": 1000, "address": 4096, "state": "active_allocated", "frames": frames}
    segment = {"device": 0, "address": 4096, "total_size": 2097152, "allocated_size": 1024, "active_size": 1024, "stream": 0,
               "segment_type": "small", "segment_pool_id": (0, 0), "is_expandable": False, "blocks": [block], "frames": frames}  # fmt: skip
    entries = [{"action": action, "addr": 4096, "size": 1000, "stream": 0, "time_us": time, "frames": frames}
               for time, action in enumerate(("alloc", "free_requested", "free_completed", "alloc"))]  # fmt: skip
    return {"segments": [segment], "device_traces": [entries], "allocator_settings": {"expandable_segments": False}}


def _baseline_seed() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "rank0.json").write_text(json.dumps(_trace()))
        job = load_job([folder], LoadOptions(), analyses.reducers())
    return json.loads(baseline.encode(baseline.baseline_of([of_document(document(job, analyses.run(job)), "seed")])))


PLAN = {"model": "llama3-8b", "mesh": {"dp_shard": 8}, "batch": {"micro_batch": 1, "sequence": 8192}, "recompute": "full"}


def _json(seed: Callable[[], Any]) -> Callable[[random.Random], bytes]:
    held: list[Any] = []

    def make(chance: random.Random) -> bytes:
        if not held:
            held.append(seed())
        data = json.dumps(mutate.tree(held[0], chance) if chance.random() < 0.8 else held[0]).encode()
        return mutate.text(data, chance) if chance.random() < 0.4 else data

    return make


def _pickle(chance: random.Random) -> bytes:
    data = pickle.dumps(mutate.tree(_snapshot(), chance), protocol=chance.choice([2, 4, 5]))
    return mutate.text(data, chance) if chance.random() < 0.5 else data


def _packed(chance: random.Random) -> bytes:
    data = json.dumps(_trace()).encode()
    pack = chance.choice([gzip.compress, zstandard.ZstdCompressor().compress, lambda text: gzip.compress(gzip.compress(text))])
    packed: bytes = pack(data)
    if chance.random() < 0.3:
        packed += pack(data)
    return mutate.text(packed, chance, 8)


def _dump(chance: random.Random) -> bytes:
    root = RankDump().call().call("all_gather", line=12).call("send 0->1").call(state=STARTED).root()
    root = mutate.tree(root, chance) if chance.random() < 0.8 else root
    data = json.dumps(root).encode() if chance.random() < 0.2 else pickle.dumps(root, protocol=chance.choice([2, 4, 5]))
    return mutate.text(data, chance) if chance.random() < 0.5 else data


# What is done with them ----------------------------------------------------------------------------------------------


def _analyze(data: bytes, folder: Path) -> None:
    path = folder / "rank0.json"
    path.write_bytes(data)
    job = load_job([str(path)], LoadOptions(jobs=1), analyses.reducers())
    encode(document(job, analyses.run(job), operations=True))


def _stream(data: bytes, folder: Path) -> None:
    path = folder / "rank0.json.gz"
    path.write_bytes(data)
    read_trace(_source(path), threads=1)


def _unpickle(data: bytes, folder: Path) -> None:
    """One in twenty as a file is read, by a child process; the others by what runs in it."""
    if zlib.crc32(data) % 20 == 0:
        path = folder / "snapshot.pickle"
        path.write_bytes(data)
        read_snapshot(_source(path))
        return
    with contextlib.suppress(EOFError, MemoryError, plain_pickle.RefusedError, *plain_pickle.DAMAGED):  # the child has limits of its own
        memory_snapshot_child.Columns(plain_pickle.PlainUnpickler(io.BytesIO(data)).load())


def _hang(data: bytes, folder: Path) -> None:
    """Beside the dump of a rank that has nothing wrong: it is joined, told and written."""
    RankDump().call().call("all_gather", line=12).write(folder / "nccl_trace_rank_0")
    (folder / "nccl_trace_rank_1").write_bytes(data)
    hang = analyze_hang(load_job([str(folder)], LoadOptions(jobs=1)))
    json.dumps([hang.json(), [str(finding) for finding in hang.findings()], [str(section) for section in hang.sections()]])


def _plan(data: bytes, folder: Path) -> None:
    path = folder / "plan.json"
    path.write_bytes(data)
    spec_of(read_file(str(path)))


def _manifest(data: bytes, folder: Path) -> None:
    decode(data, "rank_00000.manifest.json")


def _baseline(data: bytes, folder: Path) -> None:
    baseline.decode(data, "baseline.json")


def _source(path: Path) -> Source:
    status = path.stat()
    return Source(str(path), path.name, status.st_size, status.st_mtime_ns)


class _Cached:
    """Entries of both caches; those of tables also with a checksum that fits what was changed."""

    def __init__(self) -> None:
        self.seeds: list[tuple[str, bytes]] = []

    def make(self, chance: random.Random) -> bytes:
        if not self.seeds:
            self._fill()
        suffix, whole = chance.choice(self.seeds)
        if suffix == ".window":  # nobody makes a digest fit by chance, and who can write here needs none
            return suffix.encode() + b"\n" + mutate.text(whole, chance)
        body = mutate.text(whole[64:], chance)
        head = whole[:64]
        if chance.random() < 0.8:  # a checksum that fits
            head = head[:8] + zlib.crc32(body).to_bytes(4, "little") + len(body).to_bytes(8, "little") + head[20:]
        return suffix.encode() + b"\n" + head + body

    def _fill(self) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            (folder / "rank0.json").write_text(json.dumps(_trace()))
            read_window(_source(folder / "rank0.json"), Task(reducers=analyses.reducers(), cache=str(folder / "cache")))
            self.seeds = [(path.suffix, path.read_bytes()) for path in sorted((folder / "cache").iterdir())]

    def run(self, data: bytes, folder: Path) -> None:
        """Put the entry where that of a file would be, and look the file up."""
        suffix, _, entry = data.partition(b"\n")
        path, directory = folder / "rank0.json", folder / "cache"
        if not path.exists():
            path.write_text(json.dumps(_trace()))
            directory.mkdir(mode=0o700)
        source = _source(path)
        place = cache._entry(source, directory) if suffix == b".arrow" else window_cache._entry(source, [], directory)
        assert place is not None
        place.write_bytes(entry)
        if suffix == b".arrow":
            cache.load(source, directory)
        else:
            window_cache.load(source, [], directory)


_CACHED = _Cached()

TARGETS: dict[str, Target] = {
    "trace": Target(_json(_trace), _analyze),
    "stream": Target(_packed, _stream),
    "snapshot": Target(_pickle, _unpickle),
    "dump": Target(_dump, _hang),
    "manifest": Target(_json(lambda: json.loads((SAMPLES / "fsdp2_2" / "rank_00000.manifest.json").read_text())), _manifest),
    "plan": Target(_json(lambda: PLAN), _plan),
    "baseline": Target(_json(_baseline_seed), _baseline),
    "cache": Target(_CACHED.make, _CACHED.run),
}

EXPECTED = (TracekitError,)
