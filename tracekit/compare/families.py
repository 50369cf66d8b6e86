"""What a kernel or operator computes, in a word: the classes by which two runs are compared when names change from version to version."""

from __future__ import annotations

import re
from collections.abc import Sequence

#: Family -> words of operators and kernels; the first that fits counts, an operator before its kernels.
_FAMILIES: tuple[tuple[str, str], ...] = (
    ("attention", r"attention|flash|fmha|sdpa|attn|mha_"),
    ("optimizer", r"adam|sgd|lamb|optimizer|multi_tensor|_foreach_|fused_adagrad|addcdiv|lerp"),
    ("convolution", r"conv|wgrad_engine|dgrad_engine|winograd|implicit_gemm"),
    ("gemm", r"\bmm\b|addmm|bmm|matmul|linear|gemm|cutlass|xmma|cublas|nvjet|Cijk_|\bmmbackward|dot_|_grouped_mm|scaled_mm"),
    ("norm", r"norm"),
    ("softmax", r"softmax|cross_entropy|nll_loss|logsumexp"),
    ("embedding", r"embedding|index_select|gather_kernel|scatter|index_put|indexing"),
    ("reduction", r"reduce|\bsum\b|\bmean\b|argmax|\bmax\b|cumsum|segment"),
    ("sort", r"sort|topk|radix|unique"),
    ("copy", r"copy_|memcpy|memset|\bcat\b|\bto\b|_to_copy|clone|contiguous|permute|transpose|chunk_cat|split_with_sizes"),
    ("random", r"dropout|bernoulli|random|uniform|normal_"),
    (
        "elementwise",
        r"elementwise|\badd\b|\badd_\b|\bmul\b|\bmul_\b|\bdiv\b|\bsub\b|gelu|relu|silu|sigmoid|tanh|pow|sqrt|fill_|zero_|triton_",
    ),
)
_PATTERNS = tuple((name, re.compile(pattern, re.IGNORECASE)) for name, pattern in _FAMILIES)
OTHER = "other"


def family(operator: str, kernels: Sequence[str], work: str) -> str:
    """``gemm``, ``attention``, ...; ``copy`` for copies of the driver, ``other`` where nothing fits."""
    if work == "copy":
        return "copy"
    for text in (_plain(operator), *kernels):
        for name, pattern in _PATTERNS:
            if pattern.search(text):
                return name
    return OTHER


def _plain(operator: str) -> str:
    """``MmBackward0`` of ``autograd::engine::evaluate_function: MmBackward0``; its layers' word boundaries made visible."""
    text = operator.rpartition(": ")[2].rpartition("::")[2]
    return re.sub(r"Backward\d*$", "", text)
