"""What a communication call launched is communication; a call is one operation, whatever it ran as."""

import pytest

from tests.analyses.made import job_of
from tests.builder import Trace
from tests.job.test_window import activity, operations
from tests.oracle import tables
from tracekit.analyses import breakdown
from tracekit.collectives.named import parse_communication
from tracekit.errors import UsageError
from tracekit.job.window import build_activity

GATHER = {"Collective name": "_allgather_base", "In msg nelems": 512, "Out msg nelems": 1024, "dtype": "Float", "Seq": 5}
PEER, OWN = "Memcpy PtoP (Device -> Device)", "Memcpy DtoD (Device -> Device)"


def relative(trace: Trace, *columns: str) -> list[tuple[object, ...]]:
    """Operations with times from the trace's zero on."""
    zero = trace.top["baseTimeNanoseconds"]
    return [
        tuple(v - zero if c in ("start_ns", "end_ns") else v for c, v in zip(columns, row, strict=True))
        for row in operations(trace, *columns)
    ]


def step_of(trace: Trace) -> dict[str, float]:
    trace.step(1, 0, 1000)
    (row,) = breakdown.analyze(job_of(trace)).json()["breakdown"]
    return {key: row[key] for key in ("compute_us", "exposed_comm_us", "hidden_comm_us", "memory_copy_us")}


def test_a_copy_launched_by_a_record_is_the_transfer():
    trace = Trace(0, 2)
    trace.operator("record_param_comms", 10, 30, **GATHER)
    trace.kernel(PEER, 100, 300, stream=20, cat="gpu_memcpy", launch=20)
    trace.kernel(PEER, 500, 50, stream=7, cat="gpu_memcpy", launch=60)  # of nobody's call
    assert step_of(trace) == {"compute_us": 0, "exposed_comm_us": 300, "hidden_comm_us": 0, "memory_copy_us": 50}
    assert operations(trace, "kind", "evidence", "in_elements", "seq") == [("all_gather", "metadata", 512, 5)]


@pytest.mark.parametrize(("copy", "is_transfer"), [(PEER, True), (OWN, False)])
def test_a_copy_under_an_inner_operator_gets_a_tensor_ready_unless_it_leaves_the_device(copy, is_transfer):
    trace = Trace(0, 2)
    trace.operator("c10d::allgather_", 10, 60)
    trace.operator("aten::copy_", 18, 10)
    trace.kernel(copy, 100, 40, stream=20, cat="gpu_memcpy", launch=20)
    assert step_of(trace)["exposed_comm_us"] == (40 if is_transfer else 0)


@pytest.mark.parametrize("kernel", ["xyzcl_ring_step<4>(void*)", "some_vendor_reduce_base<float, 2>"])
@pytest.mark.parametrize("around", ["record", "c10d::allreduce_", "mccl:all_reduce"])
def test_a_kernel_of_no_known_name_is_communication_where_a_call_launched_it(kernel, around):
    trace = Trace(0, 2)
    if around == "record":
        trace.operator("record_param_comms", 10, 30, **{**GATHER, "Collective name": "allreduce"})
    elif around.startswith("c10d"):
        trace.operator(around, 10, 30)
    else:
        trace.annotation(around, 10, 30)
    trace.kernel(kernel, 100, 40, stream=20, launch=20)
    trace.kernel(kernel, 200, 40, launch=60)
    assert step_of(trace) == {"compute_us": 40, "exposed_comm_us": 40, "hidden_comm_us": 0, "memory_copy_us": 0}
    assert [kind for (kind,) in operations(trace, "kind")] == ["all_reduce"]


@pytest.mark.parametrize(
    "kernel", ["void at::native::(anonymous namespace)::CatArrayBatchedCopy<x>(y)", "triton_poi_fused_all_gather_0", "sm90_xmma_gemm"]
)
def test_kernels_that_compute_do_so_inside_a_call_too(kernel):
    trace = Trace(0, 2)
    trace.operator("record_param_comms", 10, 30, **GATHER)
    trace.kernel(kernel, 100, 40, launch=20)
    assert step_of(trace)["compute_us"] == 40


def test_records_of_waits_launch_no_communication_and_tell_no_group():
    trace = Trace(0, 2)
    trace.operator(
        "record_param_comms", 10, 30, **{"Collective name": "wait", "Process Group Name": "0", "Group size": 1, "Process Group Ranks": "[]"}
    )
    trace.kernel("spin(x)", 100, 40, launch=20)
    assert step_of(trace)["compute_us"] == 40
    read = activity(trace)
    assert [group.ranks for group in read.groups] == [(0, 1)]
    assert not [p for p in read.coverage.problems if "group" in p]


def test_a_call_of_three_kernels_is_one_operation_with_its_bytes_once():
    trace = Trace(0, 2)
    trace.operator("record_param_comms", 10, 60, **{**GATHER, "Collective name": "all_to_allv"})
    for i in range(3):
        trace.kernel("ncclDevKernel_SendRecv(x)", 100 + 100 * i, 90, stream=20, launch=20 + 10 * i)
    assert relative(trace, "kind", "start_ns", "end_ns", "kernels", "in_elements") == [("all_to_all", 100_000, 390_000, 3, 512)]
    assert activity(trace).device.operation.tolist() == [0, 0, 0]


def test_kernels_of_one_sequence_number_whose_launch_is_lost_are_one_call():
    trace = Trace(0, 2)
    for i in range(2):
        trace.collective("all_to_all", 100 + 100 * i, 90, seq=40)
    trace.collective("all_to_all", 300, 90, seq=41)
    assert operations(trace, "seq", "kernels") == [(40, 2), (41, 1)]


def test_an_all_reduce_inside_a_barrier_is_the_barrier():
    trace = Trace(0, 2)
    trace.operator("record_param_comms", 10, 60, **{"Collective name": "barrier", "Seq": 2})
    trace.collective("allreduce", 100, 5, elements=1, launch=20, seq=2)
    trace.collective("allreduce", 200, 50, launch=100, seq=3)
    assert operations(trace, "kind", "seq") == [("barrier", 2), ("all_reduce", 3)]


def test_a_batch_of_sends_and_receives_is_its_edges():
    trace = Trace(1, 4)
    group = {"Process Group Name": "0", "dtype": "Float", "Group size": 4}
    for at, name, edge in ((10, "send", {"Dst Rank": 2}), (30, "recv", {"Src Rank": 0})):
        sizes = {"In msg nelems": 1024 * (name == "send"), "Out msg nelems": 1024 * (name == "recv")}
        trace.operator("record_param_comms", at, 10, **{"Collective name": name, **group, **sizes, **edge})
    trace.annotation("nccl:coalesced", 50, 20)
    trace.kernel("ncclDevKernel_SendRecv(x)", 100, 50, stream=24, launch=55)
    found = relative(trace, "kind", "source_rank", "destination_rank", "start_ns", "in_elements", "out_elements", "group")
    null = -(2**63)
    assert found == [("send", null, 2, 100_000, 1024, 0, 0), ("recv", 0, null, 100_000, 0, 1024, 0)]
    assert activity(trace).device.operation.tolist() == [0]


def test_what_only_waits_for_an_exchange_of_tokens_belongs_to_it():
    trace = Trace(0, 64)
    trace.annotation("dispatch(F)", 0, 50)
    trace.kernel("void lib::ep::cuda::get_dispatch_layout<256>(x)", 100, 10, stream=27, launch=5)
    trace.kernel("void lib::ep::internode::notify_dispatch<false>(x)", 110, 30, stream=27, launch=10)
    trace.kernel("void lib::ep::internode::dispatch<false>(x)", 150, 80, stream=27, launch=15)
    trace.annotation("combine(B)", 60, 30)
    trace.kernel("void lib::ep::internode::cached_notify<false>(x)", 240, 20, stream=27, launch=65)
    trace.kernel("void lib::ep::internode::dispatch<true>(x)", 260, 60, stream=27, launch=70)
    assert relative(trace, "kind", "phase", "start_ns", "end_ns", "waiting_ns") == [
        ("all_to_all", "forward", 110_000, 230_000, 30_000),
        ("all_to_all", "backward", 240_000, 320_000, 20_000),
    ]
    purposes = job_of(trace).operations["purpose"].astype("str").tolist()
    assert purposes == ["expert_dispatch", "expert_combine"]
    assert step_of(trace) == {"compute_us": 10, "exposed_comm_us": 190, "hidden_comm_us": 0, "memory_copy_us": 0}


def test_bytes_come_from_the_shapes_of_the_operator_or_of_the_range():
    trace = Trace(0, 2)
    shapes = {"Input Dims": [[4, 8], [], []], "Input type": ["c10::BFloat16", "", ""]}
    trace.operator("_c10d_functional::all_gather_into_tensor", 10, 30, **shapes)
    trace.kernel("ncclDevKernel_AllGather_RING_LL(x)", 100, 40, stream=20, launch=20)
    trace.annotation("nccl:all_to_all", 50, 30, **{"Input Dims": [[[2, 3], [4]]], "Input type": ["TensorList"]})
    trace.kernel("ncclDevKernel_SendRecv(x)", 200, 40, stream=20, launch=60)
    found = operations(trace, "kind", "in_elements", "dtype", "group")
    assert found == [("all_gather", 32, "bfloat16", 0), ("all_to_all", 10, "", 0)]


def test_kernels_that_the_user_names():
    trace = Trace(0, 2)
    trace.kernel("our_exchange_v2<8>(x)", 100, 40, stream=20, launch=20)
    rule = parse_communication("our_exchange.*=all_to_all:ep")
    found = build_activity(tables(trace.text()), named=(rule,)).operations
    assert found[["kind", "named_axis", "implementation"]].to_numpy().tolist() == [["all_to_all", "ep", "named"]]


@pytest.mark.parametrize("text", ["", "abc", "=all_reduce", "x=allreduce", "x=all_reduce:a b", "(=all_reduce"])
def test_a_rule_that_makes_no_sense_is_refused(text):
    with pytest.raises(UsageError, match="communication"):
        parse_communication(text)


def test_peer_copies_of_a_fused_operator_are_the_collective_and_its_kernels_compute():
    trace = Trace(0, 2)
    trace.operator("symm_mem::fused_all_gather_matmul", 10, 80)
    for i in range(2):
        trace.kernel(PEER, 100 + 100 * i, 50, stream=21, cat="gpu_memcpy", launch=20 + 10 * i)
    trace.kernel("nvjet_tst_128x64", 300, 100, launch=60)
    assert [row[:2] for row in operations(trace, "kind", "kernels")] == [("all_gather", 2)]
    assert step_of(trace) == {"compute_us": 100, "exposed_comm_us": 100, "hidden_comm_us": 0, "memory_copy_us": 0}
