"""Shapes of known models, from their publications.

gpt3-175b           Brown et al., arXiv:2005.14165, table 2.1; vocabulary padded to 51,200 as in PTD-P, arXiv:2104.04473, section 5
megatron-22b, -530b, -1t    Korthikanti et al., arXiv:2205.05198, table 3
llama3-8b, -70b, -405b      The Llama 3 Herd of Models, arXiv:2407.21783, table 3; vocabulary 128,256
deepseek-v3         DeepSeek-V3, arXiv:2412.19437, section 4.2 (without its multi-token prediction module)
palm-540b           Chowdhery et al., arXiv:2204.02311, table 1
"""

from __future__ import annotations

from dataclasses import replace

from tracekit.errors import UsageError
from tracekit.estimate.shape import LatentAttention, ModelShape


def _gpt(name: str, layers: int, hidden: int, heads: int) -> ModelShape:
    return ModelShape(
        name=name, layers=layers, hidden=hidden, heads=heads, ffn=4 * hidden, vocabulary=51200, sequence=2048, qkv_bias=True,
        output_bias=True, mlp_bias=True, norm="layernorm", tied_embeddings=True, learned_positions=True, fused_qkv=True, dropout=True,
    )  # fmt: skip


def _llama(name: str, layers: int, hidden: int, heads: int, ffn: int) -> ModelShape:
    return ModelShape(
        name=name, layers=layers, hidden=hidden, heads=heads, kv_heads=8, ffn=ffn, vocabulary=128256, sequence=8192, gated=True
    )  # fmt: skip


PRESETS = {
    shape.name: shape
    for shape in (
        _gpt("gpt3-175b", 96, 12288, 96),
        _gpt("megatron-22b", 48, 6144, 64),
        _gpt("megatron-530b", 105, 20480, 128),
        _gpt("megatron-1t", 128, 25600, 160),
        _llama("llama3-8b", 32, 4096, 32, 14336),
        _llama("llama3-70b", 80, 8192, 64, 28672),
        _llama("llama3-405b", 126, 16384, 128, 53248),
        ModelShape(
            name="deepseek-v3", layers=61, hidden=7168, heads=128, ffn=18432, vocabulary=129280, sequence=4096, gated=True, experts=256,
            top_k=8, expert_ffn=2048, shared_experts=1, dense_layers=3, latent=LatentAttention(1536, 512, 128, 64, 128),
        ),
        ModelShape(
            name="palm-540b", layers=118, hidden=18432, heads=48, kv_heads=1, head_dim=256, ffn=4 * 18432, vocabulary=256000,
            sequence=2048, gated=True, tied_embeddings=True, norm="layernorm",
        ),
    )
}  # fmt: skip


def preset(name: str, sequence: int | None = None) -> ModelShape:
    """A known model, with another sequence length if given. UsageError names the ones there are."""
    if name not in PRESETS:
        raise UsageError(f"there is no model called {name!r}", f"choose one of {', '.join(PRESETS)}, or give its shape")
    shape = PRESETS[name]
    return shape if sequence is None else replace(shape, sequence=sequence)
