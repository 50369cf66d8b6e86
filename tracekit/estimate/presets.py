"""Shapes of known models, from their publications and configurations.

gpt3-175b           Brown et al., arXiv:2005.14165, table 2.1; vocabulary padded to 51,200 as in PTD-P, arXiv:2104.04473, section 5
megatron-22b, -530b, -1t    Korthikanti et al., arXiv:2205.05198, table 3
llama3-8b, -70b, -405b      The Llama 3 Herd of Models, arXiv:2407.21783, table 3; vocabulary 128,256
deepseek-v3         DeepSeek-V3, arXiv:2412.19437, section 4.2 (without its multi-token prediction module)
palm-540b           Chowdhery et al., arXiv:2204.02311, table 1
the others          the ``config.json`` that is published with their weights (``huggingface`` reads any other)
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from tracekit.errors import UsageError, choose
from tracekit.estimate.shape import LatentAttention, ModelShape


def _gpt(name: str, layers: int, hidden: int, heads: int, vocabulary: int = 51200, sequence: int = 2048) -> ModelShape:
    return ModelShape(
        name=name, layers=layers, hidden=hidden, heads=heads, ffn=4 * hidden, vocabulary=vocabulary, sequence=sequence, qkv_bias=True,
        output_bias=True, mlp_bias=True, norm="layernorm", tied_embeddings=True, learned_positions=True, fused_qkv=True, dropout=True,
    )  # fmt: skip


def _llama(name: str, sizes: Iterable[int], vocabulary: int = 128256, sequence: int = 8192, **more: Any) -> ModelShape:
    """``sizes``: layers, hidden, heads, heads of keys and values, width of the MLP."""
    layers, hidden, heads, kv_heads, ffn = sizes
    return ModelShape(layers, hidden, heads, ffn, vocabulary, sequence, kv_heads=kv_heads, gated=True, rotary=True, name=name, **more)


def _experts(count: int, top_k: int, ffn: int, shared: int = 0, dense: int = 0, every: int = 1) -> dict[str, int]:
    return {"experts": count, "top_k": top_k, "expert_ffn": ffn, "shared_experts": shared, "dense_layers": dense, "expert_every": every}


_QWEN2: dict[str, Any] = {"vocabulary": 152064, "qkv_bias": True}
_QWEN3: dict[str, Any] = {"vocabulary": 151936, "qk_norm": True, "head_dim": 128}
_GEMMA: dict[str, Any] = {"tied_embeddings": True, "post_norms": True}

PRESETS = {
    shape.name: shape
    for shape in (
        _gpt("gpt2", 12, 768, 12, 50257, 1024),
        _gpt("gpt2-xl", 48, 1600, 25, 50257, 1024),
        _gpt("gpt3-175b", 96, 12288, 96),
        _gpt("megatron-22b", 48, 6144, 64),
        _gpt("megatron-530b", 105, 20480, 128),
        _gpt("megatron-1t", 128, 25600, 160),
        _llama("llama2-7b", (32, 4096, 32, 32, 11008), 32000, 4096),
        _llama("llama2-13b", (40, 5120, 40, 40, 13824), 32000, 4096),
        _llama("llama2-70b", (80, 8192, 64, 8, 28672), 32000, 4096),
        _llama("llama3-8b", (32, 4096, 32, 8, 14336)),
        _llama("llama3-70b", (80, 8192, 64, 8, 28672)),
        _llama("llama3-405b", (126, 16384, 128, 8, 53248)),
        _llama("llama3.2-1b", (16, 2048, 32, 8, 8192), tied_embeddings=True),
        _llama("llama3.2-3b", (28, 3072, 24, 8, 8192), tied_embeddings=True),
        _llama("llama4-scout", (48, 5120, 40, 8, 16384), 202048, **_experts(16, 1, 8192, shared=1)),
        _llama("llama4-maverick", (48, 5120, 40, 8, 16384), 202048, **_experts(128, 1, 8192, shared=1, every=2)),
        _llama("mixtral-8x7b", (32, 4096, 32, 8, 14336), 32000, **_experts(8, 2, 14336)),
        _llama("mixtral-8x22b", (56, 6144, 48, 8, 16384), 32768, **_experts(8, 2, 16384)),
        _llama("qwen2.5-7b", (28, 3584, 28, 4, 18944), **_QWEN2),
        _llama("qwen2.5-72b", (80, 8192, 64, 8, 29568), **_QWEN2),
        _llama("qwen3-8b", (36, 4096, 32, 8, 12288), **_QWEN3),
        _llama("qwen3-32b", (64, 5120, 64, 8, 25600), **_QWEN3),
        _llama("qwen3-30b-a3b", (48, 2048, 32, 4, 6144), **_QWEN3, **_experts(128, 8, 768)),
        _llama("qwen3-235b-a22b", (94, 4096, 64, 4, 12288), **_QWEN3, **_experts(128, 8, 1536)),
        _llama("deepseek-v2-lite", (27, 2048, 16, 16, 10944), 102400, 4096, **_experts(64, 6, 1408, shared=2, dense=1),
               latent=LatentAttention(0, 512, 128, 64, 128)),
        _llama("deepseek-v2", (60, 5120, 128, 128, 12288), 102400, 4096, **_experts(160, 6, 1536, shared=2, dense=1),
               latent=LatentAttention(1536, 512, 128, 64, 128)),
        _llama("deepseek-v3", (61, 7168, 128, 128, 18432), 129280, 4096, **_experts(256, 8, 2048, shared=1, dense=3),
               latent=LatentAttention(1536, 512, 128, 64, 128)),
        _llama("gemma2-9b", (42, 3584, 16, 8, 14336), 256000, head_dim=256, **_GEMMA),
        _llama("gemma2-27b", (46, 4608, 32, 16, 36864), 256000, head_dim=128, **_GEMMA),
        _llama("gemma3-27b", (62, 5376, 32, 16, 21504), 262208, head_dim=128, qk_norm=True, **_GEMMA),
        ModelShape(
            name="palm-540b", layers=118, hidden=18432, heads=48, kv_heads=1, head_dim=256, ffn=4 * 18432, vocabulary=256000,
            sequence=2048, gated=True, rotary=True, tied_embeddings=True, norm="layernorm",
        ),
    )
}  # fmt: skip
#: Other names of the same shapes.
ALIASES = {f"llama3.1-{size}": f"llama3-{size}" for size in ("8b", "70b", "405b")} | {"llama3.3-70b": "llama3-70b"}
ALIASES |= {"deepseek-r1": "deepseek-v3", "qwen2-7b": "qwen2.5-7b", "qwen2-72b": "qwen2.5-72b"}


def _plain(name: str) -> str:
    """A name without its owner, case, hyphens and what its training was: ``meta-llama/Llama-3.1-8B-Instruct`` is llama3.18b."""
    words = re.sub(r"-(instruct|base|chat|it|hf|v0\.1)\b", "", name.lower().rpartition("/")[2])
    return re.sub(r"[^a-z0-9.]", "", words.removeprefix("meta-"))


_KNOWN = {_plain(name): shape for name, shape in PRESETS.items()} | {_plain(other): PRESETS[name] for other, name in ALIASES.items()}


def preset(name: str, sequence: int | None = None) -> ModelShape:
    """A known model, its name in any case and spelling, with another sequence length if given. UsageError names the likely one, or all."""
    shape = _KNOWN.get(_plain(name))
    if shape is None:
        raise UsageError(f"there is no model called {name[:80]!r}", f"{choose(name, PRESETS)} Or give its sizes, or its config.json")
    return shape if sequence is None else replace(shape, sequence=sequence)
