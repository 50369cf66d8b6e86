"""Units and buckets: what is listed of them, and when they are too coarse or too fine. Synthetic traces and manifests."""

from __future__ import annotations

from dataclasses import replace

from tests.analyses.made import Trace, job_of
from tracekit.analyses import units
from tracekit.manifest import Manifest, Unit


def of(found: list[Unit], *traces: Trace) -> units.Units:
    job = job_of(*traces)
    return units.analyze(replace(job, windows=[replace(w, manifest=Manifest(rank=w.rank or 0, units=found)) for w in job.windows]))


def ddp(begins: list[int]) -> Trace:
    """Two steps of a millisecond, a bucket of 100 elements reduced at each of these times [us]."""
    trace = Trace(0, 2)
    for number in range(2):
        trace.step(number, 1000 * number, 1000)
        for seq, begin in enumerate(begins):
            more = {"seq": 10 * number + seq, "launch": 1000 * number + begin - 1, "description": "mesh_dp_replicate", "group": "1"}
            trace.collective("allreduce", 1000 * number + begin, 50, elements=100, ranks="[0, 1]", **more)
    return trace


BUCKETS = [Unit("bucket 0", "ddp_bucket", ["head", "norm"], 300, 300), Unit("bucket 1", "ddp_bucket", ["up"], 100, 100)]


def test_buckets_are_listed_in_their_order_with_contents_and_times() -> None:
    found = of(BUCKETS, ddp([300, 420]))
    rows = found.json()["sharding_units"]
    assert rows == [
        {"unit": "bucket 0", "kind": "ddp_bucket", "root": False, "parameters": 2, "first": "head", "last": "norm", "elements": 300,
         "padding": 0, "share": 0.75, "begins_us": 0.0},
        {"unit": "bucket 1", "kind": "ddp_bucket", "root": False, "parameters": 1, "first": "up", "last": "up", "elements": 100,
         "padding": 0, "share": 0.25, "begins_us": 120.0},
    ]  # fmt: skip
    assert found.findings() == []
    (section,) = found.sections()
    assert section.charts[0].title == "DDP buckets"


def test_times_are_not_told_where_more_is_reduced_than_buckets() -> None:
    assert [row["begins_us"] for row in of(BUCKETS, ddp([300, 420, 500])).json()["sharding_units"]] == [None, None]


def test_without_units_there_is_a_reason() -> None:
    told = of([Unit("layers.0", "module", ["a"], 3, 3)], ddp([300])).json()
    assert told["sharding_units"] is None and "no manifest" in told["not_measured"]["sharding_units"]


def fsdp(sizes: list[tuple[int, int]]) -> Trace:
    """One step of all-gathers, each of (elements, us)."""
    trace, at = Trace(0, 2), 10
    trace.step(1, 0, 10_000)
    for seq, (elements, length) in enumerate(sizes):
        more = {"seq": seq, "launch": at - 1, "description": "mesh_dp_shard", "group": "1", "ranks": "[0, 1]"}
        trace.collective("allgather", at, length, elements=elements, **more)
        at += length + 10
    return trace


def test_one_unit_of_the_whole_model_is_too_coarse() -> None:
    whole = [Unit("", "fsdp2", ["a", "b"], 10**8, 10**8, True)]
    (finding,) = of(whole, fsdp([(1000, 100)])).findings()
    assert (finding.id, finding.severity, finding.value) == ("units.coarse", "warning", 1.0)
    assert "the whole model is one unit" in finding.text
    (finding,) = of([Unit("", "fsdp1", [], 20, 20, True), Unit("layers.0", "fsdp1", [], 80, 80)], fsdp([(1000, 100)])).findings()
    assert finding.severity == "info" and "unit layers.0 holds 80% of the parameters" in finding.text
    assert of([Unit(f"layers.{i}", "fsdp2", [], 50, 50) for i in range(2)], fsdp([(1000, 100)])).findings() == []


def test_many_small_units_take_time_and_move_nothing() -> None:
    nine = [Unit(f"u{i}", "fsdp2", [], 10, 10) for i in range(9)]
    (finding,) = of(nine, fsdp([(1000, 70), *[(10, 10)] * 3])).findings()
    assert (finding.id, finding.value) == ("units.fine", 0.3)
    assert "3 of 4 FSDP all-gathers a step" in finding.text and "2.9% of the bytes, 30% of the time (30 us a step" in finding.text
    assert of(nine, fsdp([(1000, 700), (10, 10)])).findings() == []  # 1.4% of the time
    assert of(nine[:8], fsdp([(1000, 70), *[(10, 10)] * 3])).findings() == []  # a usual number of units
