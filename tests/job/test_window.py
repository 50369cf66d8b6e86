"""One file linked: device work, communication operations, and where each figure comes from."""

from tests.builder import Trace, group
from tests.oracle import tables
from tracekit.job.activity import Work
from tracekit.job.window import build_activity
from tracekit.trace.steps import step_times


def activity(trace):
    return build_activity(tables(trace.text()))


def operations(trace, *columns):
    frame = activity(trace).operations
    return [tuple(row) for row in frame[list(columns)].astype("object").itertuples(index=False)]


def test_work_is_classified_linked_and_sorted():
    trace = Trace(0, 2)
    trace.step(1, 0, 1000)
    trace.collective("allreduce", 400, 50, launch=200, seq=7)
    trace.kernel("gemm", 100, 200, launch=20, op="aten::mm")
    trace.kernel("Memcpy HtoD", 350, 10, cat="gpu_memcpy", launch=30)
    a = activity(trace)
    names = [a.tables.text(int(c)) for c in a.device.name]
    assert names[:2] == ["gemm", "Memcpy HtoD"]
    assert a.device.work.tolist() == [Work.COMPUTE, Work.COPY, Work.COMMUNICATION]
    assert [a.tables.text(int(a.tables.name[r])) for r in a.device.operator_row if r >= 0] == ["aten::mm", "record_param_comms"]
    assert a.device.step.tolist() == [0, 0, 0]
    assert a.device.operation.tolist() == [-1, -1, 0]
    assert not a.on_cpu


def test_metadata_decides_before_the_name_of_the_kernel():
    trace = Trace(0, 2)
    trace.collective("_allgather_base", 10, 5, elements=8, out_elements=16, kernel="ncclDevKernel_Broadcast_RING_LL(x)", seq=3)
    assert operations(trace, "kind", "evidence", "seq", "in_elements", "out_elements", "dtype") == [
        ("all_gather", "metadata", 3, 8, 16, "float32")
    ]


def test_record_param_comms_speaks_for_a_kernel_without_metadata():
    trace = Trace(0, 2)
    trace.operator("record_param_comms", 15, 20, **{"Collective name": "allreduce", "In msg nelems": 9, "dtype": "Half", "Seq": 4})
    trace.kernel("ncclDevKernel_SendRecv(x)", 50, 5, stream=20, launch=20)
    assert operations(trace, "kind", "evidence", "seq", "in_elements", "dtype") == [("all_reduce", "metadata", 4, 9, "float16")]


def test_without_metadata_the_operator_then_the_annotation_then_the_name():
    trace = Trace(0, 2)
    trace.operator("c10d::alltoall_base_", 10, 30)
    trace.kernel("ncclKernel_SendRecv_RING", 100, 5, launch=20)
    trace.annotation("nccl:all_to_all", 40, 20)
    trace.kernel("ncclKernel_SendRecv_RING", 110, 5, launch=50)
    trace.kernel("ncclKernel_SendRecv_RING", 120, 5, launch=70)
    assert operations(trace, "kind", "evidence", "group") == [
        ("all_to_all", "operator", 0),
        ("all_to_all", "annotation", 0),
        ("send_recv", "kernel_name", 0),
    ]


def test_the_copy_of_an_annotation_on_the_device_is_not_communication():
    trace = Trace(0, 2)
    trace.collective("allreduce", 10, 5)
    trace.kernel("nccl:all_reduce", 10, 5, cat="gpu_user_annotation", stream=20)
    assert len(activity(trace).operations) == 1


def test_context_and_phase_come_from_the_launch():
    trace = Trace(0, 2)
    trace.annotation("FSDP::pre_forward", 0, 100)
    trace.annotation("FSDP::all_gather (layers.0)", 10, 50)
    trace.collective("_allgather_base", 500, 5, launch=20)
    assert operations(trace, "context", "phase") == [("FSDP::all_gather (layers.0)", "forward")]


def test_gloo_runs_a_reduce_scatter_as_an_all_reduce():
    """The c10d operator tells the kind; the n-th range of one size belongs to the n-th call of that size."""
    trace = Trace(0, 2, backend="gloo", device=None)
    shapes = {"Input Dims": [[[16]], []], "Input type": ["TensorList", "Scalar"]}
    own = {"Input Dims": [[16]], "Input type": ["float"]}
    trace.operator("c10d::_reduce_scatter_base_", 0, 5, **{"Input Dims": [[8], [16]], "Input type": ["float", "float"]})
    trace.operator("c10d::allreduce_", 10, 5, **shapes)
    trace.annotation("gloo:all_reduce", 12, 30, tid=77, **own)
    trace.annotation("gloo:all_reduce", 50, 30, tid=77, **own)
    found = operations(trace, "kind", "implementation", "in_elements", "dtype")
    assert ("all_reduce", "gloo", 16, "float32") in found
    assert len(found) == 2


def test_on_the_cpu_operators_compute_and_the_backend_communicates():
    trace = Trace(0, 2, backend="gloo", device=None)
    trace.operator("aten::linear", 0, 100)
    trace.operator("aten::mm", 10, 50)
    trace.operator("aten::outer", 200, 100)
    trace.operator("c10d::allreduce_", 220, 30)
    trace.annotation("gloo:all_reduce", 225, 40, tid=77)
    a = activity(trace)
    assert a.on_cpu
    start, end = a.device.of(Work.COMPUTE)
    base = a.window[0]
    assert ((start - base) // 1000).tolist() == [0, 200, 250]
    assert ((end - base) // 1000).tolist() == [100, 220, 300]
    assert len(a.device.of(Work.COMMUNICATION)[0]) == 1


def test_chosen_steps_leave_the_others_outside():
    trace = Trace(0, 1)
    for n in range(4):
        trace.step(n, 100 * n, 100)
        trace.kernel("k", 100 * n + 10, 50)
    a = build_activity(tables(trace.text()), steps=(1, 3))
    assert a.steps.number.tolist() == [1, 2]
    assert a.device.step.tolist() == [0, 1]
    assert step_times(a.steps, a.window).number.tolist() == [1, 2]
    none = build_activity(tables(trace.text()), steps=(9, 10))
    assert len(step_times(none.steps, none.window)) == 0


def test_graph_replays_are_said():
    trace = Trace(0, 2)
    trace.launch(5, 0, name="cudaGraphLaunch")
    for i in range(3):
        trace.kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 100 + 10 * i, 5, correlation=5)
    a = activity(trace)
    assert len(a.operations) == 3
    assert any("CUDA graph" in p and "process group" in p for p in a.coverage.problems)


def test_groups_of_one_rank_know_their_members():
    trace = Trace(0, 4, groups=[group("0", "default_pg", [0, 1, 2, 3]), group("5", "mesh_tp", [0, 1])])
    trace.collective("allreduce", 10, 5, group="5", description="mesh_tp", ranks=[0, 1])
    a = activity(trace)
    assert a.groups[a.operations["group"][0]].ranks == (0, 1)


def test_gloo_on_a_rank_of_one_group_can_only_be_there():
    trace = Trace(0, 2, backend="gloo", device=None)
    trace.annotation("gloo:all_reduce", 10, 30, tid=77)
    a = activity(trace)
    assert a.groups[a.operations["group"][0]].description == "default_pg"
    assert any("only one this rank is in" in p for p in a.coverage.problems)
    two = Trace(0, 2, groups=[group("0", "default_pg", [0, 1]), group("1", "x", [0, 1])], backend="gloo", device=None)
    two.annotation("gloo:all_reduce", 10, 30, tid=77)
    assert activity(two).operations["group"].tolist() == [-1]
