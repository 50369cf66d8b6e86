"""The merged trace, read back by a reader of its own: slices, tracks, one clock, ends of flows, counters, findings."""

import json
import pickle

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from tests.builder import BASE, Trace, group
from tests.export.reader import check_nesting, read
from tracekit.cli.main import cli
from tracekit.export.spool import MOST_LEVELS, levels

SAMPLES = __import__("pathlib").Path(__file__).resolve().parents[2] / "sample_traces"


def export(*arguments):
    done = CliRunner().invoke(cli, ["export", "--no-cache", *map(str, arguments)], standalone_mode=False)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


@pytest.fixture
def two_ranks(tmp_path):
    """Two ranks of one axis on two hosts whose clocks differ by 5 ms; one collective, one send from 0 to 1."""
    folder = tmp_path / "job"
    folder.mkdir()
    for rank in (0, 1):
        trace = Trace(rank, 2, groups=[group("0", "mesh_dp_shard", [0, 1])], base=BASE + 5_000_000 * rank, host_name=f"host{rank}")
        trace.step(1, 0, 1000)
        trace.operator("aten::mm", 50, 40)
        trace.kernel("gemm", start=100, dur=100.5, launch=60)
        late = 30 * rank
        trace.collective("allreduce", start=300 + late, dur=100 - late, seq=1, launch=250, description="mesh_dp_shard")
        trace.collective("allreduce", start=500 + late, dur=100 - late, seq=2, launch=450, description="mesh_dp_shard")
        side = {"Src Rank": 0, "Dst Rank": 1}
        start = 700 if rank == 0 else 650
        trace.collective(
            "send" if rank == 0 else "recv", start=start, dur=800 - start, stream=21, seq=3, description="mesh_dp_shard", **side
        )
        trace.write(folder / f"rank{rank}.json")
    out = tmp_path / "merged.json.gz"
    export(folder, "-o", out, "-q")
    return read(out)


def names(merged, process, thread):
    return [one.name.partition("(")[0] for one in merged.tracks[process][thread]]


def test_every_rank_is_a_process_and_streams_are_split_by_axis(two_ranks):
    first, second = (next(p for p in two_ranks.tracks if p.startswith(f"rank {rank}")) for rank in (0, 1))
    assert first == "rank 0 (dp_shard 0) on host0"
    assert names(two_ranks, first, "stream 7: compute") == ["gemm"]
    assert names(two_ranks, second, "stream 20: dp_shard") == ["ncclDevKernel_AllReduce_Sum_f32_RING_LL"] * 2
    assert names(two_ranks, second, "stream 21: dp_shard") == ["ncclDevKernel_SendRecv"]
    assert names(two_ranks, first, "thread 4000")[0] == "ProfilerStep#1"


def test_times_are_on_one_clock_to_the_nanosecond(two_ranks):
    """Rank 1's clock is 5 ms ahead: its first collective began 30 us after rank 0's, and both ended together."""
    (first, second) = (next(t for p, t in two_ranks.tracks.items() if p.startswith(f"rank {rank}")) for rank in (0, 1))
    one, other = first["stream 20: dp_shard"][0], second["stream 20: dp_shard"][0]
    assert (other.start - one.start, one.dur, other.dur) == (30_000, 100_000, 70_000)
    assert [s.dur for s in first["stream 7: compute"]] == [100_500]
    assert two_ranks.base == BASE and first["thread 4000"][0].start == 0


def test_a_collective_leads_from_the_first_arrival_to_the_last(two_ranks):
    collectives = [ends for (cat, _), ends in two_ranks.flows.items() if cat == "collective"]
    by_names = sorted([(process[:6], one.name.partition("(")[0][-8:]) for process, _, one in ends] for ends in collectives)
    assert len(by_names) == 3
    assert by_names.count([("rank 0", "_RING_LL"), ("rank 1", "_RING_LL")]) == 2


def test_a_transfer_leads_from_the_send_to_the_recv_that_waited_before_it(two_ranks):
    ends = [ends for ends in two_ranks.flows.values() if "SendRecv" in ends[0][2].name]
    assert [[process[:6] for process, _, _ in one] for one in ends if len(one) > 1] == [["rank 0", "rank 1"]]


def test_launches_lead_to_their_kernels(two_ranks):
    launches = [ends for (cat, _), ends in two_ranks.flows.items() if cat == "launch"]
    assert len(launches) == 2 * 3
    assert all(a[2].name == "cudaLaunchKernel" and b[1].startswith("stream") for a, b in launches)


def test_operations_tell_what_they_are(two_ranks):
    (thread,) = [t["stream 20: dp_shard"] for p, t in two_ranks.tracks.items() if p.startswith("rank 0")]
    told = thread[0].args
    assert (told["kind"], told["axis"], told["full_bytes"], told["seq"], told["wait_ns"]) == ("all_reduce", "dp_shard", 4096, 1, 30_000)


def test_findings_stand_above_the_ranks(two_ranks):
    above = [name for thread, name, _ in two_ranks.instants if thread != "findings"]
    assert two_ranks.other["findings"] == len(above) > 0
    assert {name for thread, name, _ in two_ranks.instants if thread == "findings"} <= set(above)
    assert all(set(told) == {"severity", "evidence", "advice"} for _, _, told in two_ranks.instants)


def test_slices_nest_on_every_track(two_ranks):
    check_nesting(two_ranks)


@pytest.mark.parametrize("name", ["hybrid_3d_8", "fsdp2_2"])
def test_a_sample_is_whole(name, tmp_path):
    """As many slices as the traces have complete events on the host; memory as the table has it; flows between ranks only."""
    out = tmp_path / "merged.json"
    export(SAMPLES / name, "-o", out, "-q")
    merged = read(out)
    check_nesting(merged)
    assert merged.other["left_out"] == 0
    assert sum(len(s) for threads in merged.tracks.values() for s in threads.values()) == merged.other["slices"]
    collectives = [ends for (cat, _), ends in merged.flows.items() if cat == "collective"]
    assert len(collectives) == merged.other["flows"] > 0
    assert all(len({process for process, _, _ in ends}) == len(ends) > 1 for ends in collectives)
    parts = {process for process, _, key in merged.counters if key == "parameters"}
    assert len(parts) == len(merged.tracks)
    timeline = tmp_path / "memory.parquet"
    export(SAMPLES / name, "--table", "memory_timeline", "-o", timeline, "-q")
    frame = __import__("pandas").read_parquet(timeline)
    own = frame[(frame["rank"] == 0) & (frame["category"] == "parameters")]
    process = next(p for p in parts if p.startswith("rank 0"))
    (values,) = [v for (p, _, key), v in merged.counters.items() if (p, key) == (process, "parameters")]
    assert [int(v) for _, v in values] == own["bytes"].tolist()
    assert [t + merged.base for t, _ in values] == own["time_ns"].tolist()


def test_a_rank_with_a_snapshot_alone_has_its_counters(tmp_path):
    """Allocated 512 B at 10 us, 1,536 B at 20 us: the trace begins with the first of them."""
    frames = [{"filename": "train.py", "line": 1, "name": "step"}]
    events = [
        {"action": "alloc", "addr": 4096 * n, "size": 512 * n, "stream": 0, "time_us": 10 * n, "frames": frames, "device": 0}
        for n in (1, 2)
    ]
    snapshot = {"segments": [], "device_traces": [events]}
    (tmp_path / "rank0_snapshot.pickle").write_bytes(pickle.dumps(snapshot))
    out = tmp_path / "merged.json"
    export(tmp_path / "rank0_snapshot.pickle", "-o", out, "-q")
    merged = read(out)
    ((process, name, _), *_) = merged.counters
    totals: dict[int, float] = {}
    for values in merged.counters.values():
        for at, value in values:
            totals[at] = totals.get(at, 0) + value
    assert process.startswith("rank 0") and name.startswith("memory") and merged.base > 0
    assert max(totals.values()) == 1536 and min(totals) == 0


def test_hostile_names_stay_text(tmp_path):
    nasty = 'x"},{"ph":"X</script>\n\u2028\\'
    trace = Trace(0, 1)
    trace.step(1, 0, 100)
    trace.kernel(nasty, start=10, dur=5)
    trace.write(tmp_path / "rank0.json")
    out = tmp_path / "merged.json"
    export(tmp_path / "rank0.json", "-o", out, "-q")
    (slices,) = [threads["stream 7: compute"] for threads in read(out).tracks.values() if "stream 7: compute" in threads]
    assert [one.name for one in slices] == [nasty]
    assert "</script>" not in out.read_text()


def test_what_overlaps_moves_to_a_track_of_its_own(tmp_path):
    trace = Trace(0, 1)
    trace.step(1, 0, 1000)
    trace.annotation("first", 10, 100)
    trace.annotation("second", 50, 100)
    trace.kernel("gemm", start=10, dur=5)
    trace.write(tmp_path / "rank0.json")
    out = tmp_path / "merged.json"
    export(tmp_path / "rank0.json", "-o", out, "-q")
    merged = read(out)
    check_nesting(merged)
    (threads,) = [t for p, t in merged.tracks.items() if p.startswith("rank 0")]
    assert [s.name for s in threads["thread 4000 (overlapping 1)"]] == ["second"]


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20), st.integers(0, 2)), max_size=40))
def test_levels_nest_whatever_overlaps(spans):
    start, length, track = (np.array([s[i] for s in spans], np.int64) for i in range(3))
    found = levels(start, start + length, track)
    for key in set(zip(track.tolist(), found.tolist(), strict=True)):
        if key[1] == MOST_LEVELS:
            continue
        own = sorted((s, -(s + d)) for (s, d, t), at in zip(spans, found.tolist(), strict=True) if (t, at) == key)
        open_ends: list[int] = []
        for begin, end in own:
            while open_ends and open_ends[-1] <= begin:
                open_ends.pop()
            assert not open_ends or -end <= open_ends[-1]
            open_ends.append(-end)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["-o", "x.txt"], "end the name with .json, .json.gz"),
        (["--table", "operations", "-o", "x.json"], "end the name with .csv, .parquet, .xlsx"),
        (["--table", "nothing", "-o", "x.csv"], "there is no table 'nothing'"),
        (["--table", "operation", "-o", "x.csv"], "did you mean operations?"),
        (["--table", "events", "-o", "x.csv"], "tracekit query PATH 'FROM events' -o events.parquet"),
        (["-o", "x.csv"], "x.csv is the name of a table, and none is named; --table NAME"),
        (["--table", "all", "-o", "x.csv"], "holds one table"),
        ([], "say where to"),
        (["--executor", "dask", "-o", "x.json"], "reads on this machine"),
    ],
)
def test_what_cannot_be_written_is_said_in_a_line(arguments, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, ["export", str(SAMPLES / "fsdp2_2"), *arguments])
    assert done.exit_code == 2 and reason in done.output
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_is_json_has_finite_numbers_only(two_ranks):
    assert json.loads(json.dumps(two_ranks.other)) == two_ranks.other
