"""One vocabulary for what traces of all ages and backends call their collectives.

Four spellings meet here: the metadata of NCCL (``_allgather_base``), operators (``c10d::_allgather_base_``), annotations of
a backend (``nccl:_all_gather_base``) and kernel names (``ncclDevKernel_AllGather_RING_LL``). Metadata is to be believed first,
the kernel's name last.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

POINT_TO_POINT = ("send", "recv", "send_recv")
#: Kinds that say nothing against any other kind.
VAGUE = ("send_recv", "unknown")
#: Kinds in which no rank can leave before the last one has arrived, as each needs something of every other.
BLOCKING = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "barrier")

#: A spelling without its separators and decorations (see ``_bare``), and the kind it stands for.
_SPELLINGS = {
    "allreduce": "all_reduce",
    "allreducesparse": "all_reduce",
    "sparseallreduce": "all_reduce",
    "allreducecoalesced": "all_reduce",
    "allgather": "all_gather",
    "allgatherbase": "all_gather",
    "allgathercoalesced": "all_gather",
    "allgatherinto": "all_gather",
    "allgatherintotensor": "all_gather",
    "allgatherintotensorcoalesced": "all_gather",
    "allgatherv": "all_gather",
    "reducescatter": "reduce_scatter",
    "reducescatterbase": "reduce_scatter",
    "reducescattertensor": "reduce_scatter",
    "reducescattertensorcoalesced": "reduce_scatter",
    "reducescatterv": "reduce_scatter",
    "reducescattercoalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoallv": "all_to_all",
    "alltoallbase": "all_to_all",
    "alltoallsingle": "all_to_all",
    "alltoallsingleautograd": "all_to_all",
    "alltoallvdev": "all_to_all",
    "alltoallvdev2d": "all_to_all",
    "alltoallvdev2doffset": "all_to_all",
    "alltoallvbase": "all_to_all",
    "sharddimalltoall": "all_to_all",
    "broadcast": "broadcast",
    "broadcastcoalesced": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
    "isend": "send",
    "recv": "recv",
    "irecv": "recv",
    "recvanysource": "recv",
    "sendrecv": "send_recv",
    "batchisendirecv": "send_recv",
    "batchp2pops": "send_recv",
    "barrier": "barrier",
    "monitoredbarrier": "barrier",
    "allreducebarrier": "barrier",
    "coalesced": "unknown",
    "groupstart": "unknown",
    "groupend": "unknown",
}


def _bare(text: str) -> str:
    """``_allgather_into_tensor_out`` and ``all_gather_into_tensor_`` alike become ``allgatherintotensor``."""
    bare = text.lower().replace("_", "").replace("-", "")
    for ending in ("oop", "out", "inplace", "functional"):
        if bare.endswith(ending) and bare[: -len(ending)] in _SPELLINGS:
            return bare[: -len(ending)]
    return bare


@lru_cache(maxsize=4096)
def kind_of_collective_name(text: str) -> str | None:
    """Kind of the metadata's ``Collective name``; None for records that move nothing (``wait``, ``init``)."""
    return _SPELLINGS.get(_bare(text))


_OPERATOR = re.compile(r"(?:c10d|_?c10d_functional|_c10d_functional_autograd|_dtensor|symm_mem|deep_ep)::(\w+)")
#: How an operator on symmetric memory says which algorithm or library moves the bytes; the collective's own name follows.
_ALGORITHMS = ("multimem", "one_shot", "two_shot", "low_contention", "multi_root", "tile", "nvshmem", "nccl")


@lru_cache(maxsize=65536)
def kind_of_operator(text: str) -> str | None:
    """Kind of an operator that is a collective call (``c10d::allreduce_``, ``_c10d_functional::all_gather_into_tensor``); else None.

    None as well for operators that wait (``wait_tensor``), that put or get one-sidedly, and that fuse a collective with a multiplication:
    what runs inside the last is mostly compute.
    """
    found = _OPERATOR.fullmatch(text)
    if found is None:
        return None
    name = found.group(1)
    if text.startswith("symm_mem::"):
        name = _without_algorithm(name)
    kind = _SPELLINGS.get(_bare(name))
    return None if kind == "unknown" else kind


_FUSED = re.compile(r"symm_mem::_?fused_\w*?(all_gather|reduce_scatter|all_reduce|all_to_all)\w*")


@lru_cache(maxsize=65536)
def kind_of_fused_operator(text: str) -> str | None:
    """Kind of the collective in an operator that fuses it with a multiplication (``symm_mem::fused_all_gather_matmul``); else None.

    Its kernels mostly compute; the copies between devices in it are the collective's transfer.
    """
    found = _FUSED.fullmatch(text)
    return found.group(1) if found is not None else None


def _without_algorithm(name: str) -> str:
    """``multimem_one_shot_all_reduce_out`` becomes ``all_reduce``."""
    name = name.strip("_")
    while (algorithm := next((a for a in _ALGORITHMS if name.startswith(a + "_")), "")) != "":
        name = name[len(algorithm) + 1 :]
    for ending in ("_offset", "_out", "_copy"):
        name = name.removesuffix(ending)
    return name


#: A backend's own range: whatever ends in "ccl" is a vendor's library in the image of NCCL (xccl, mccl, hccl, ...).
_ANNOTATION = re.compile(r"^(?:[a-z]{0,4}ccl|gloo|mpi|ucc|cncl|smddp):(\w+)(?:\s+\d+\s*(?:->|<-)\s*\d+)?$")


@lru_cache(maxsize=65536)
def kind_of_annotation(text: str) -> str | None:
    """Kind of a backend's own range (``nccl:all_reduce``, ``gloo:send``, ``nccl:recv 1<-0``); None for any other annotation."""
    found = _ANNOTATION.match(text)
    return None if found is None else _SPELLINGS.get(_bare(found.group(1)), "unknown")


@dataclass(frozen=True)
class KernelClass:
    """What the name of a communication kernel tells; the kind may be ``unknown`` or ``send_recv``."""

    kind: str  # vocabulary.Kind
    implementation: str  # who wrote it
    moves_data: bool = True  # False: it only waits for the other ranks, or exchanges counts with them


#: Words in a kernel's name, without underscores and in lower case. What holds another comes first: AllReduce holds Reduce.
_IN_KERNEL = (
    ("crossdevicereduce", "all_reduce"),
    ("allreduce", "all_reduce"),
    ("reducescatter", "reduce_scatter"),
    ("allgather", "all_gather"),
    ("alltoall", "all_to_all"),
    ("sendrecv", "send_recv"),
    ("broadcast", "broadcast"),
    ("bcast", "broadcast"),
    ("reduce", "reduce"),
    ("scatter", "scatter"),
    ("gather", "gather"),
    ("barrier", "barrier"),
    ("dispatch", "all_to_all"),
    ("combine", "all_to_all"),
    ("send", "send"),
    ("recv", "recv"),
    ("receive", "recv"),
)

#: What a kernel of an expert library does that moves tokens between ranks, or gets ready to; layouts and casts are computed.
_EXCHANGE = r"\w*(?:dispatch|combine|notify|barrier|sync|clean_low_latency)(?!_layout)\w*"

#: (pattern of the kernel's own name, implementation). First match wins. A name may begin after the digits of a mangled one.
_FAMILIES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(rf"(?<![a-z_])(?:{pattern})", re.I), implementation)
    for pattern, implementation in (
        (r"ncclSymk?(?:Dev)?(?:Kernel)?_", "nccl_symmetric"),
        (r"rccl\w*kernel|rccl_", "rccl"),
        (r"nccl\w*kernel", "nccl"),
        (r"multimem_\w*(?:reduce|gather|scatter)|(?:one|two)_shot_all_?reduce|symm_mem|low_contention_", "symmetric_memory"),
        (r"c10d::symmetric_memory::", "symmetric_memory"),
        (r"cross_device_reduce|\w+_cross_device_(?:reduce|store)|(?:one|two)shot_?all_?reduce|trtllm_all_?reduce", "custom"),
        (r"all_?reduce_(?:fusion_kernel|prototype|(?:one|two)_?shot)|hybridCubeMeshAllReduce", "custom"),
        (r"nvshmem", "nvshmem"),
        (r"k?userbuffers_", "userbuffers"),
        (r"deep_ep::(?!layout::|\w*layout)", "deep_ep"),
        (rf"hybrid_ep::(?:\w+::)*{_EXCHANGE}", "hybrid_ep"),
        (rf"uccl::(?:\w+::)*{_EXCHANGE}", "uccl"),
        (rf"pplx\w*::(?:\w+::)*{_EXCHANGE}|a2a_(?:dispatch|combine)_(?:send|recv)\w*", "pplx"),
        (r"Ep(?:Dispatch|Combine)\w*Kernel", "mori"),
        (r"moe_?A(?:ll)?_?(?:2|To)_?A(?:ll)?_?(?:Dispatch|Combine)?_?Kernel", "trtllm_moe"),
        # any library that has its exchange of experts in a namespace or file of its own
        (rf"(?:\w+::)*(?:ep|expert_parallel|internode(?:_ll)?|intranode)::(?:\w+::)*{_EXCHANGE}", "expert_library"),
        (r"msccl(?:pp)?(?:::|_|kernel)", "msccl"),
        (r"hcom_|hccl", "hccl"),
        (r"ccl_(?:all|reduce|broadcast|send|recv)|oneccl_", "oneccl"),
        (r"[a-z]{1,4}ccl(?:Symk?)?(?:Dev)?Kernel|cncl\w*Kernel", "vendor_ccl"),
    )
)
#: Libraries that exchange tokens between experts.
EXPERT_LIBRARIES = ("deep_ep", "hybrid_ep", "uccl", "pplx", "mori", "trtllm_moe", "expert_library")
#: Kernels of Transformer Engine's userbuffers by the middle or end of their names.
_USERBUFFERS = (
    (r"pushsendrecv", "send_recv"),
    (r"pushsend", "send"),
    (r"pushrecv", "recv"),
    (r"_ag(?:_|$)", "all_gather"),
    (r"_rs(?:_|$)", "reduce_scatter"),
    (r"sum|allreduce", "all_reduce"),
)
#: Kernels that a compiler wrote are called after the operators they were made from, collectives among them.
_COMPILER = re.compile(r"^(?:void )?triton_(?:poi|red|per|tem|for|mm|unk|cpp)_|^(?:void )?(?:torch_)?inductor_|_fused_\w*wait_tensor")
_LAYOUT = re.compile(r"get_dispatch_layout|dispatch_layout")
#: Kernels of a communication library in which no payload moves.
_WAITS = re.compile(r"notify|barrier|(?:^|[_:])sync|device_sync|wait|clean_low_latency|Sanitize", re.I)
#: Kernels that compute, or copy within a device, also where a communication call launches them (concatenation before, casts, reductions).
_COMPUTE = re.compile(
    r"at::native|at_cuda|cutlass|cublas|cudnn|gemm|xmma|\bcub::|thrust::|elementwise|CatArray|chunk_cat|split_with_sizes|layer_?norm|rms_?norm"
    r"|softmax|flash|attention|transpose|dispatch_layout|(?:^|[_:])(?:cast|quant|dequant|fill|memset)|per_(?:token|channel|tensor)_|triton_",
    re.I,
)
#: Nothing beyond this many characters of a kernel's name is looked at.
_NAME_LENGTH = 1000


@lru_cache(maxsize=65536)
def kernel_class(name: str) -> KernelClass | None:
    """What a kernel of this name communicates; None for a kernel that computes.

    NCCL's Generic kernels are ``unknown``; SendRecv kernels ``send_recv``. A name that merely holds "reduce" or "broadcast" (every tensor
    library has such kernels) is not communication: the family must be known.
    """
    own = _own_name(name[:_NAME_LENGTH])
    if _COMPILER.search(own) or _LAYOUT.search(own):
        return None
    for pattern, implementation in _FAMILIES:
        found = pattern.search(own)
        if found is not None:
            return KernelClass(_kind_in(own, found.start(), implementation), implementation, _WAITS.search(own) is None)
    return None


@lru_cache(maxsize=65536)
def computes(name: str) -> bool:
    """Whether a kernel of this name is known to compute, or to copy within its own device, wherever it was launched."""
    own = _own_name(name[:_NAME_LENGTH])
    return _COMPILER.search(own) is not None or (kernel_class(name) is None and _COMPUTE.search(own) is not None)


def _own_name(name: str) -> str:
    """A demangled name without its template arguments and parameters, which may hold the names of other functions."""
    name = name.replace("(anonymous namespace)::", "")
    if "<" not in name and "(" not in name:
        return name
    depth, kept = 0, []
    for character in name:
        if character in "<(":
            depth += 1
        elif character in ">)":
            depth = max(depth - 1, 0)
        elif not depth:
            kept.append(character)
    return "".join(kept)


def _kind_in(own: str, start: int, implementation: str) -> str:
    """The collective that the name says: behind ``kernel_`` where there is one, else anywhere from the family's word on."""
    if implementation in EXPERT_LIBRARIES:
        return "barrier" if "barrier" in own[start:].lower() else "all_to_all"
    if implementation == "userbuffers":
        return next((kind for ending, kind in _USERBUFFERS if re.search(ending, own[start:])), "unknown")
    bare = own[start:].lower().replace("_", "")
    tail = bare.partition("kernel")[2]
    for text in (tail, bare):
        for word, kind in _IN_KERNEL:
            if word in text:
                return kind
    return "unknown"


#: torch's name and bytes of every element type, under every spelling: metadata (BFloat16), operators (c10::BFloat16, long int), torch.
_TYPES: dict[str, tuple[str, int]] = {}
for _size, _name, _spellings in (
    (4, "float32", "Float float float32 fp32"),
    (8, "float64", "Double double float64"),
    (2, "float16", "Half c10::Half half float16 fp16"),
    (2, "bfloat16", "BFloat16 c10::BFloat16 bfloat16 bf16 bfp16"),
    (8, "int64", "Long long|int long int64 long|long"),
    (4, "int32", "Int int int32"),
    (2, "int16", "Short short short|int int16"),
    (1, "int8", "Char char signed|char int8 int8_t"),
    (1, "uint8", "Byte byte unsigned|char uint8 uint8_t"),
    (1, "bool", "Bool bool"),
    (2, "uint16", "UInt16 uint16 unsigned|short unsigned|short|int"),
    (4, "uint32", "UInt32 uint32 unsigned|int"),
    (8, "uint64", "UInt64 uint64 unsigned|long unsigned|long|int"),
    (1, "float8_e4m3fn", "Float8_e4m3fn c10::Float8_e4m3fn float8_e4m3fn"),
    (1, "float8_e4m3fnuz", "Float8_e4m3fnuz c10::Float8_e4m3fnuz float8_e4m3fnuz"),
    (1, "float8_e5m2", "Float8_e5m2 c10::Float8_e5m2 float8_e5m2"),
    (1, "float8_e5m2fnuz", "Float8_e5m2fnuz c10::Float8_e5m2fnuz float8_e5m2fnuz"),
    (1, "float8_e8m0fnu", "Float8_e8m0fnu c10::Float8_e8m0fnu float8_e8m0fnu"),
    (1, "float4_e2m1fn_x2", "Float4_e2m1fn_x2 c10::Float4_e2m1fn_x2 float4_e2m1fn_x2"),
    (4, "complex32", "ComplexHalf c10::complex<c10::Half> complex32"),
    (8, "complex64", "ComplexFloat c10::complex<float> complex64"),
    (16, "complex128", "ComplexDouble c10::complex<double> complex128"),
    (1, "qint8", "QInt8 c10::qint8 qint8"),
    (1, "quint8", "QUInt8 c10::quint8 quint8"),
    (4, "qint32", "QInt32 c10::qint32 qint32"),
    (1, "quint4x2", "QUInt4x2 c10::quint4x2 quint4x2"),
    (1, "quint2x4", "QUInt2x4 c10::quint2x4 quint2x4"),
    (1, "bits8", "Bits8 c10::bits8 bits8"),
    (2, "bits16", "Bits16 c10::bits16 bits16"),
):
    for _spelling in _spellings.split():
        _TYPES[_spelling.replace("|", " ")] = (_name, _size)


def element_type(text: str) -> tuple[str, int | None]:
    """(torch's name, bytes an element); an unknown type comes back as it was written, with None: its size is never guessed."""
    return _TYPES.get(text.strip().removeprefix("torch."), (text, None))
