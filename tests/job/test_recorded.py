"""What the recorder's manifest adds: group and sequence of collectives of a backend that leaves neither in the trace."""

import pytest

from tests.builder import Trace
from tests.oracle import tables
from tracekit.errors import InputError
from tracekit.job.load import LoadOptions, load_job
from tracekit.job.window import build_activity
from tracekit.manifest import Axis, Calls, Group, Manifest, Owners, decode, encode
from tracekit.units import NULL


def shapes(elements):
    return {"Input Dims": [[[elements]], []], "Input type": ["TensorList", "Scalar"]}


def own(elements):
    return {"Input Dims": [[elements]], "Input type": ["float"]}


def test_every_range_of_a_host_backend_takes_the_first_call_that_no_earlier_one_took():
    """Two calls are queued before the first of their ranges begins; none of them may stay without its call."""
    trace = Trace(0, 2, backend="gloo", device=None)
    for start in (0, 10, 20, 50):
        trace.operator("c10d::allreduce_", start, 5, **shapes(16))
    for start, tid in ((2, 77), (30, 78), (31, 77), (55, 78)):
        trace.annotation("gloo:all_reduce", start, 8, tid=tid, **own(16))
    launch = build_activity(tables(trace.text())).operations["launch_ns"]
    assert ((launch - launch[0]) // 1000).tolist() == [0, 10, 20, 50]


def test_a_send_begins_with_its_call():
    """gloo opens the range when the call returns; by then the message may have arrived."""
    trace = Trace(0, 2, backend="gloo", device=None)
    trace.operator("c10d::send", 10, 50, **shapes(16))
    trace.operator("c10d::recv_", 70, 5, **shapes(16))
    trace.annotation("gloo:send", 58, 30, **own(16))
    trace.annotation("gloo:recv", 74, 30, **own(16))
    found = build_activity(tables(trace.text())).operations
    base = found["launch_ns"].min()
    assert ((found["start_ns"] - base) // 1000).tolist() == [0, 64]
    assert ((found["end_ns"] - base) // 1000).tolist() == [78, 94]


def test_a_range_that_began_before_its_window_has_no_call_and_takes_none_away():
    trace = Trace(0, 2, backend="gloo", device=None)
    trace.annotation("gloo:all_reduce", 0, 8, tid=77, **own(16))
    trace.operator("c10d::allreduce_", 10, 5, **shapes(16))
    trace.annotation("gloo:all_reduce", 12, 8, tid=77, **own(16))
    launch = build_activity(tables(trace.text())).operations["launch_ns"].tolist()
    assert launch[0] == NULL
    assert launch[1] != NULL


def made():
    trace = Trace(0, 4, backend="gloo", device=None)
    trace.step(1, 0, 100)
    trace.operator("c10d::allreduce_", 10, 5, **shapes(16))
    trace.operator("c10d::allreduce_", 20, 5, **shapes(32))
    trace.annotation("gloo:all_reduce", 12, 6, tid=77, **own(16))
    trace.annotation("gloo:all_reduce", 22, 6, tid=78, **own(32))
    return tables(trace.text())


def manifest(read, **calls):
    base = int(read.ts[read.ts != NULL].min())
    groups = [Group("7", [0, 1], "mesh_tp", "tp"), Group("8", [0, 2], "mesh_dp_shard", "dp_shard")]
    times = [base + 12_000, base + 24_000]
    columns = {"group": [1, 0], "seq": [5, 9], "name": [0, 0], "peer": [-1, -1], "elements_in": [16, 32], "elements_out": [16, 32]}
    return Manifest(
        world_size=4,
        mesh=[Axis("dp_shard", 2), Axis("tp", 2)],
        groups=groups,
        calls=Calls(time_ns=times, **{**columns, **calls}, strings=["gloo:all_reduce"], source="flight_recorder"),
    )


def test_a_call_seen_by_the_flight_recorder_gives_group_and_sequence():
    read = made()
    activity = build_activity(read, None, manifest(read))
    found = activity.operations
    assert [activity.groups[g].description for g in found["group"]] == ["mesh_dp_shard", "mesh_tp"]
    assert found["seq"].tolist() == [5, 9]
    assert found["launch_step"].tolist() == [0, 0]


def test_a_share_of_a_scatter_has_the_type_that_the_flight_recorder_saw():
    """The root shows one input a rank; the others show none, neither in the range nor in the operator's list of lists."""
    trace = Trace(0, 4, backend="gloo", device=None)
    shares = {"Input Dims": [[[4]], [], []], "Input type": ["TensorList", "", ""]}
    trace.operator("c10d::scatter_", 10, 5, **shares)
    trace.operator("c10d::scatter_", 20, 5, **shares)
    trace.annotation("gloo:scatter", 12, 6, tid=77, **{"Input Dims": [[4], [4]], "Input type": ["float", "float"]})
    trace.annotation("gloo:scatter", 22, 6, tid=77)
    read = tables(trace.text())
    given = manifest(read, elements_in=[8, 0], elements_out=[4, 4], name=[0, 0], dtype=[0, 0])
    calls = Calls(**{**{f: getattr(given.calls, f) for f in Calls.__struct_fields__}, "strings": ["Float"]})
    found = build_activity(read, None, Manifest(world_size=4, groups=given.groups, calls=calls)).operations
    assert found["dtype"].tolist() == ["float32", "float32"]
    assert found["in_elements"].tolist() == [8, NULL]
    assert found["out_elements"].tolist() == [4, 4]


def test_a_call_of_no_listed_group_leaves_the_group_unknown():
    read = made()
    found = build_activity(read, None, manifest(read, group=[-1, 0])).operations
    assert found["group"].tolist()[0] == -1


def test_lost_calls_are_said():
    read = made()
    given = manifest(read)
    calls = Calls(**{**{f: getattr(given.calls, f) for f in Calls.__struct_fields__}, "lost": 3})
    build_activity(read, None, Manifest(world_size=4, groups=given.groups, calls=calls))
    assert any("overwritten its first 3 collectives" in problem for problem in read.coverage.problems)


def test_the_size_of_a_job_whose_trace_does_not_tell_it_is_the_manifests(tmp_path):
    for rank in (0, 1):
        trace = Trace(None)
        trace.step(1, 0, 100)
        trace.write(tmp_path / f"rank_0000{rank}.pt.trace.json")
        told = Manifest(tracekit_version="1", rank=rank, world_size=4, backend="gloo", host="a")
        (tmp_path / f"rank_0000{rank}.manifest.json").write_bytes(encode(told))
    job = load_job([str(tmp_path)], LoadOptions())
    assert (job.world_size, job.missing_ranks, job.backend) == (4, [2, 3], "gloo")
    assert not [entry for entry in job.notes if entry.code == "world_size_not_recorded"]


def test_a_manifest_comes_back_as_it_was_written():
    read = made()
    given = manifest(read)
    assert decode(encode(given), "m") == given


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"{", "is no manifest"),
        (b"[]", "is no manifest"),
        (b'{"rank": 3, "world_size": 2}', "rank 3 is none of 2 ranks"),
        (b'{"schema_version": 99}', "newer tracekit"),
        (b'{"calls": {"time_ns": [1]}}', "differ in length"),
        (encode(Manifest(owners=Owners([1], [2], [3], [0], [0], [7], ["a"]))), "point outside their strings"),
        (encode(Manifest(calls=Calls([1], [3], [0], [0], [0], [0], [0], ["a"]))), "groups that it does not list"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused_in_one_line(text, told):
    with pytest.raises(InputError, match=told) as error:
        decode(text, "rank_00000.manifest.json")
    assert "\n" not in str(error.value)


def test_a_tensor_without_dimensions_has_one_element():
    """``[]`` of an element type is a scalar tensor; ``[]`` of anything else is no tensor at all."""
    trace = Trace(0, 2, backend="gloo", device=None)
    trace.operator("c10d::allreduce_", 0, 5, **{"Input Dims": [[[]], [], []], "Input type": ["TensorList", "", "Scalar"]})
    trace.annotation("gloo:all_reduce", 2, 6, tid=77, **{"Input Dims": [[]], "Input type": ["float"]})
    found = build_activity(tables(trace.text())).operations
    assert found["in_elements"].tolist() == [1]
    assert (found["launch_ns"] != NULL).all()


def test_inputs_and_outputs_of_an_operator_are_told_apart():
    """An all-gather of 8 elements and a reduce-scatter into 8 pass the same two sizes, in the other order."""
    trace = Trace(0, 2, backend="gloo", device=None)
    types = ["float", "float", "Scalar"]
    trace.operator("c10d::_allgather_base_", 0, 5, **{"Input Dims": [[16], [8], []], "Input type": types})
    trace.operator("c10d::_reduce_scatter_base_", 10, 5, **{"Input Dims": [[8], [16], []], "Input type": types})
    trace.annotation("gloo:all_gather", 2, 5, tid=77, **own(8))
    trace.annotation("gloo:all_reduce", 12, 5, tid=78, **own(16))
    found = build_activity(tables(trace.text())).operations
    assert found["kind"].tolist() == ["all_gather", "reduce_scatter"]
    assert found["in_elements"].tolist() == [8, 16]
    assert found["out_elements"].tolist() == [16, 8]
