"""Every spelling of a collective ends in one vocabulary, and no kernel of a tensor library is taken for one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracekit.collectives.kinds import (
    element_type,
    kernel_class,
    kind_of_annotation,
    kind_of_collective_name,
    kind_of_operator,
)
from tracekit.vocabulary import KINDS

KERNELS = {
    # NCCL before 2.12, 2.12 to 2.18, since 2.19, in lower case, on symmetric memory
    "ncclAllReduceRingLLKernel_sum_f16(ncclColl)": ("all_reduce", "nccl"),
    "ncclReduceTreeLL128Kernel_sum_f64(ncclColl)": ("reduce", "nccl"),
    "ncclSendRecvKernel_copy_i8(ncclColl)": ("send_recv", "nccl"),
    "ncclBroadcastRingLLKernel_copy_i8(ncclColl)": ("broadcast", "nccl"),
    "ncclKernel_ReduceScatter_RING_SIMPLE_Sum_half(ncclDevComm*, unsigned long, ncclWork*)": ("reduce_scatter", "nccl"),
    "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)": ("send_recv", "nccl"),
    "ncclDevKernel_AllGather_NVLS(ncclDevKernelArgsStorage<4096ul>)": ("all_gather", "nccl"),
    "ncclDevKernel_AllGatherV_RING_LL(ncclDevKernelArgsStorage<4096ul>)": ("all_gather", "nccl"),
    "ncclDevKernel_AllReduce_Sum_u8_TREE_LL(ncclDevKernelArgsStorage<4096ul>)": ("all_reduce", "nccl"),
    "nccldevkernel_reducescatter_sum_bf16_ring_ll": ("reduce_scatter", "nccl"),
    "ncclDevKernel_Generic_2(ncclDevKernelArgsStorage<4096ul>)": ("unknown", "nccl"),
    "_Z23ncclDevKernel_Generic_124ncclDevKernelArgsStorageILm4096EE": ("unknown", "nccl"),
    "ncclSymDevKernel_AllGather_STMC(ncclSymDevWorkArgs)": ("all_gather", "nccl_symmetric"),
    "ncclSymkDevKernel_ReduceScatter_RailA2A_LsaLD_sum_bf16(ncclSymkDevWorkArgs4K)": ("reduce_scatter", "nccl_symmetric"),
    # AMD
    "void rcclGenericKernel<2, true>(ncclDevKernelArgsStorage<4096ul>)": ("unknown", "rccl"),
    "mscclKernel_Sum_half_LL(ncclDevComm*, mscclAlgo*, mscclWork*)": ("unknown", "msccl"),
    "void mscclpp::allreduce7<__half>(__half*, __half*)": ("all_reduce", "msccl"),
    # symmetric memory in torch
    "void (anonymous namespace)::multimem_one_shot_all_reduce_kernel<float, 16, 8>(float*)": ("all_reduce", "symmetric_memory"),
    "void c10d::symmetric_memory::(anonymous namespace)::two_shot_all_reduce_kernel_inplace<float, 16>(float**)": (
        "all_reduce",
        "symmetric_memory",
    ),
    "void multimem_all_gather_kernel<16>(char*, char*, unsigned long)": ("all_gather", "symmetric_memory"),
    "c10d::symmetric_memory::barrier_kernel(unsigned int**, int, int, int, unsigned long)": ("barrier", "symmetric_memory"),
    # inference engines
    "void vllm::cross_device_reduce_2stage<__half, 4>(vllm::RankData*)": ("all_reduce", "custom"),
    "void sglang::cross_device_reduce_1stage<float, 2>(sglang::RankData*)": ("all_reduce", "custom"),
    "std::enable_if<(true), void>::type aiter::cross_device_reduce_1stage<__half, 8>(aiter::RankData*)": ("all_reduce", "custom"),
    "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<__nv_bfloat16>(int)": ("all_reduce", "custom"),
    "void tensorrt_llm::kernels::twoShotAllReduceKernel<__half, 8, true>(int)": ("all_reduce", "custom"),
    # experts
    "void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*)": ("all_to_all", "deep_ep"),
    "void deep_ep::internode_ll::combine<true, 3, 7168, 9>(void*)": ("all_to_all", "deep_ep"),
    "void mori::moe::EpDispatchIntraNodeKernel<__hip_bfloat16>(mori::moe::EpDispatchCombineArgs)": ("all_to_all", "mori"),
    # other vendors
    "hcom_allReduce__293_647_1": ("all_reduce", "hccl"),
    "hcom_receive__100_3_1": ("recv", "hccl"),
    "oneccl_allreduce_pcie": ("all_reduce", "oneccl"),
    "nvshmemx_barrier_all_on_stream_kernel": ("barrier", "nvshmem"),
}
COMPUTE = [
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::func_wrapper_t<float>, unsigned int, float, 4> >(int)",
    "void at::native::_scatter_gather_elementwise_kernel<128, 4, at::native::_cuda_scatter_gather_internal_kernel<true, float> >(int)",
    "void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long, long, long, long, bool)",
    "void at::native::elementwise_kernel<128, 2, at::native::broadcast_add>(int)",
    "void splitKreduce_kernel<32, 16, int, float>(cublasSplitKParams<float>, float const*)",
    "void flash::flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits<64> >(Flash_fwd_params)",
    "void cub::DeviceReduceByKeyKernel<cub::DispatchReduceByKey<long*, int> >(int)",
    "triton_poi_fused__to_copy_all_gather_into_tensor_wait_tensor_3",
    "triton_red_fused_one_shot_all_reduce_0",
    "void deep_ep::layout::get_dispatch_layout<256, 4, 8>(long const*, int*)",
    "void apply_with<ncclDevKernel_AllReduce_Sum_f32>(int)",  # another function's name inside a template argument
    "reduce",
    "gather_points_kernel",
    "",
]


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_tells_its_collective_and_who_wrote_it(name: str) -> None:
    found = kernel_class(name)
    assert found is not None
    assert (found.kind, found.implementation) == KERNELS[name]


@pytest.mark.parametrize("name", COMPUTE)
def test_a_word_alone_makes_no_collective(name: str) -> None:
    assert kernel_class(name) is None


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("allreduce", "all_reduce"),
        ("allreduce_coalesced", "all_reduce"),
        ("allreduce_sparse", "all_reduce"),
        ("_allgather_base", "all_gather"),
        ("all_gather", "all_gather"),
        ("allgather_into_tensor_coalesced", "all_gather"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("reduce_scatter_tensor_coalesced", "reduce_scatter"),
        ("all_to_allv", "all_to_all"),
        ("all_to_all", "all_to_all"),
        ("alltoall_base", "all_to_all"),
        ("_broadcast_oop", "broadcast"),
        ("_reduce_oop", "reduce"),
        ("gather", "gather"),
        ("scatter", "scatter"),
        ("send", "send"),
        ("recv", "recv"),
        ("barrier", "barrier"),
        ("coalesced", "unknown"),
        ("wait", None),
        ("init", None),
        ("", None),
    ],
)
def test_metadata(text: str, kind: str | None) -> None:
    assert kind_of_collective_name(text) == kind


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("c10d::allreduce_", "all_reduce"),
        ("c10d::_allgather_base_", "all_gather"),
        ("c10d::allgather_into_tensor_coalesced_", "all_gather"),
        ("c10d::reduce_scatter_tensor_coalesced_", "reduce_scatter"),
        ("c10d::alltoall_base_", "all_to_all"),
        ("c10d::alltoall_", "all_to_all"),
        ("c10d::send", "send"),
        ("c10d::recv_any_source_", "recv"),
        ("c10d::monitored_barrier_", "barrier"),
        ("c10d::gather_", "gather"),
        ("c10d::reduce_", "reduce"),
        ("_c10d_functional::all_gather_into_tensor_out", "all_gather"),
        ("_c10d_functional::reduce_scatter_tensor_coalesced", "reduce_scatter"),
        ("_c10d_functional_autograd::all_to_all_single", "all_to_all"),
        ("_c10d_functional::isend", "send"),
        ("_c10d_functional::batch_p2p_ops", "send_recv"),
        ("c10d_functional::broadcast", "broadcast"),
        ("_dtensor::shard_dim_alltoall", "all_to_all"),
        ("symm_mem::multimem_all_reduce_", "all_reduce"),
        ("symm_mem::one_shot_all_reduce_copy_out", "all_reduce"),
        ("symm_mem::multimem_one_shot_reduce_out", "reduce"),
        ("symm_mem::_low_contention_reduce_scatter", "reduce_scatter"),
        ("symm_mem::all_to_all_vdev_2d_offset", "all_to_all"),
        ("symm_mem::nvshmem_broadcast", "broadcast"),
        # calls that are no collective of their own
        ("_c10d_functional::wait_tensor", None),
        ("_c10d_functional::_wrap_tensor_autograd", None),
        ("c10d::check_for_nan", None),
        ("symm_mem::fused_all_gather_matmul", None),
        ("symm_mem::get_remote_tensors", None),
        ("symm_mem::nvshmem_put", None),
        ("aten::scatter_", None),
        ("aten::gather", None),
        ("aten::broadcast_tensors", None),
        ("mylib::all_reduce", None),
        ("record_param_comms", None),
        ("c10d::", None),
    ],
)
def test_operators(text: str, kind: str | None) -> None:
    assert kind_of_operator(text) == kind


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("nccl:all_reduce", "all_reduce"),
        ("nccl:all_reduce_barrier", "barrier"),
        ("nccl:_all_gather_base", "all_gather"),
        ("nccl:_broadcast_oop", "broadcast"),
        ("nccl:send 0->1", "send"),
        ("nccl:recv 1<-0", "recv"),
        ("nccl:all_to_all", "all_to_all"),
        ("nccl:coalesced", "unknown"),
        ("nccl:something_of_next_year", "unknown"),
        ("gloo:all_reduce", "all_reduce"),
        ("gloo:recvAnySource", "recv"),
        ("mpi:broadcast", "broadcast"),
        ("ucc:reduce_scatter", "reduce_scatter"),
        ("xccl:all_gather_into_tensor_coalesced", "all_gather"),
        ("hccl:send 3->4", "send"),
        ("all_reduce", None),
        ("nccl: my own range", None),
        ("DistributedDataParallel.forward", None),
    ],
)
def test_annotations(text: str, kind: str | None) -> None:
    assert kind_of_annotation(text) == kind


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Float", ("float32", 4)),
        ("BFloat16", ("bfloat16", 2)),
        ("c10::BFloat16", ("bfloat16", 2)),
        ("Half", ("float16", 2)),
        ("double", ("float64", 8)),
        ("long int", ("int64", 8)),
        ("Long", ("int64", 8)),
        ("signed char", ("int8", 1)),
        ("unsigned char", ("uint8", 1)),
        ("Bool", ("bool", 1)),
        ("UInt16", ("uint16", 2)),
        ("Float8_e4m3fn", ("float8_e4m3fn", 1)),
        ("Float8_e5m2fnuz", ("float8_e5m2fnuz", 1)),
        ("Float8_e8m0fnu", ("float8_e8m0fnu", 1)),
        ("Float4_e2m1fn_x2", ("float4_e2m1fn_x2", 1)),
        ("ComplexHalf", ("complex32", 4)),
        ("c10::complex<float>", ("complex64", 8)),
        ("ComplexDouble", ("complex128", 16)),
        ("QInt8", ("qint8", 1)),
        ("torch.bfloat16", ("bfloat16", 2)),
        ("Float3_of_tomorrow", ("Float3_of_tomorrow", None)),
        ("", ("", None)),
    ],
)
def test_the_size_of_an_element_is_known_or_said_to_be_unknown(text: str, expected: tuple[str, int | None]) -> None:
    assert element_type(text) == expected


@given(st.text(max_size=80), st.sampled_from(["", "void ", "nccl", "ncclDevKernel_", "c10d::", "gloo:", "symm_mem::", "<<((", "deep_ep::"]))
def test_any_text_gets_a_kind_of_the_vocabulary_or_none(text: str, prefix: str) -> None:
    name = prefix + text
    kernel = kernel_class(name)
    kinds = [kind_of_collective_name(name), kind_of_operator(name), kind_of_annotation(name), kernel and kernel.kind]
    assert all(kind is None or kind in KINDS for kind in kinds)
    assert element_type(name)[0] is not None


def test_a_name_of_a_million_characters_costs_no_more_than_a_short_one() -> None:
    assert kernel_class("nccl" * 250_000) is None
    assert kernel_class("ncclDevKernel_AllReduce" + "<" * 1_000_000) is not None
