"""A model's shape from the ``config.json`` that Hugging Face publishes beside its weights.

Known are the families llama (2 to 4), mistral, granite, smollm3, mixtral, qwen2 and qwen3 with their mixtures of experts, deepseek_v2 and
v3, gemma (1 to 3), phi3 and gpt2. Keys and defaults are those of transformers' configuration classes. Of a model that sees pictures its
text part is taken.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tracekit.errors import InputError, UsageError, choose
from tracekit.estimate.shape import LatentAttention, ModelShape

#: Longest sequence that is taken from ``max_position_embeddings``, which tells what a model can read, not what it is trained with.
SEQUENCE = 8192
#: A configuration is a few kB.
MOST_BYTES = 10 * 2**20
Config = Mapping[str, Any]


def read_config(path: str) -> ModelShape:
    """The shape in a ``config.json``. InputError for a file that is none; UsageError for a family that is not known."""
    try:
        if Path(path).stat().st_size > MOST_BYTES:
            raise InputError(f"{path}: larger than {MOST_BYTES} bytes", "give the config.json of a model")
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or 'cannot be read'}", "give the path of a model's config.json") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: is no JSON ({' '.join(str(error).split())[:100]})", "give the config.json of a model") from error
    if not isinstance(found, dict):
        raise InputError(f"{path}: holds no keys with values", "give the config.json of a model")
    try:
        return shape_of(found)
    except UsageError as error:
        raise InputError(f"{path}: {error.problem}", error.remedy) from error


def shape_of(config: Config) -> ModelShape:
    """The shape that the keys of a configuration describe."""
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        config = {**config, **{key: value for key, value in inner.items() if value is not None}}
    family = str(config.get("model_type", ""))[:80]
    if family not in _FAMILIES:
        raise UsageError(f"models of type {family!r} are not known", choose(family, _FAMILIES))
    return _FAMILIES[family](config)


def _number(config: Config, key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 10**9:
        raise UsageError(f"{key} is {'not given' if value is None else 'no whole number from 0 to 1,000,000,000'}", "give it a value")
    return value


def _flag(config: Config, key: str, default: bool = False) -> bool:
    return bool(config.get(key, default))


def _name(config: Config) -> str:
    return str(config.get("_name_or_path") or config.get("model_type"))[:80].rpartition("/")[2] or "model"


def _llama(config: Config, **more: Any) -> ModelShape:
    heads = _number(config, "num_attention_heads")
    bias = _flag(config, "attention_bias")
    values: dict[str, Any] = {
        "layers": _number(config, "num_hidden_layers"),
        "hidden": _number(config, "hidden_size"),
        "heads": heads,
        "kv_heads": _number(config, "num_key_value_heads", heads),
        "head_dim": _number(config, "head_dim", 0),
        "ffn": _number(config, "intermediate_size"),
        "vocabulary": _number(config, "vocab_size"),
        "sequence": min(SEQUENCE, _number(config, "max_position_embeddings", SEQUENCE)),
        "gated": True,
        "rotary": True,
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": _flag(config, "mlp_bias"),
        "tied_embeddings": _flag(config, "tie_word_embeddings"),
        "name": _name(config),
    }
    return ModelShape(**{**values, **more})


def _llama4(config: Config) -> ModelShape:
    """``intermediate_size`` is an expert's, ``intermediate_size_mlp`` that of layers without; every layer with experts has a shared one."""
    return _llama(
        config,
        ffn=_number(config, "intermediate_size_mlp", 16384),
        experts=_number(config, "num_local_experts", 16),
        top_k=_number(config, "num_experts_per_tok", 1),
        expert_ffn=_number(config, "intermediate_size"),
        shared_experts=1,
        expert_every=_number(config, "interleave_moe_layer_step", 1),
    )


def _mixtral(config: Config) -> ModelShape:
    return _llama(config, experts=_number(config, "num_local_experts", 8), top_k=_number(config, "num_experts_per_tok", 2))


def _experts(config: Config) -> int:
    """How many experts a layer has: newer versions of transformers call all of them local."""
    return _number(config, "num_experts" if config.get("num_experts") is not None else "num_local_experts")


def _qwen_experts(config: Config, **more: Any) -> ModelShape:
    width, shared = _number(config, "moe_intermediate_size"), _number(config, "shared_expert_intermediate_size", 0)
    dense = config.get("mlp_only_layers") or []
    if dense != list(range(len(dense))):
        raise UsageError("mlp_only_layers names layers without experts that are not the first", "give the sizes of the model by themselves")
    return _llama(
        config,
        experts=_experts(config),
        top_k=_number(config, "num_experts_per_tok"),
        expert_ffn=width,
        shared_experts=shared // width if width else 0,
        shared_gate=shared > 0,
        dense_layers=len(dense),
        expert_every=_number(config, "decoder_sparse_step", 1),
        **more,
    )


def _deepseek(config: Config) -> ModelShape:
    latent = LatentAttention(
        _number(config, "q_lora_rank", 0),
        _number(config, "kv_lora_rank"),
        _number(config, "qk_nope_head_dim"),
        _number(config, "qk_rope_head_dim"),
        _number(config, "v_head_dim"),
    )
    return _llama(
        config,
        head_dim=0,
        experts=_number(config, "n_routed_experts", 0),
        top_k=_number(config, "num_experts_per_tok", 1),
        expert_ffn=_number(config, "moe_intermediate_size", 0),
        shared_experts=_number(config, "n_shared_experts", 0),
        dense_layers=_number(config, "first_k_dense_replace", 0),
        expert_every=_number(config, "moe_layer_freq", 1),
        latent=latent,
    )


def _gemma(config: Config, **more: Any) -> ModelShape:
    return _llama(config, head_dim=_number(config, "head_dim", 256), tied_embeddings=_flag(config, "tie_word_embeddings", True), **more)


def _gpt2(config: Config) -> ModelShape:
    hidden = _number(config, "n_embd", 768)
    return ModelShape(
        layers=_number(config, "n_layer", 12),
        hidden=hidden,
        heads=_number(config, "n_head", 12),
        ffn=_number(config, "n_inner", 4 * hidden),
        vocabulary=_number(config, "vocab_size", 50257),
        sequence=_number(config, "n_positions", 1024),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        norm="layernorm",
        tied_embeddings=_flag(config, "tie_word_embeddings", True),
        learned_positions=True,
        fused_qkv=True,
        dropout=True,
        name=_name(config),
    )


_FAMILIES: dict[str, Callable[[Config], ModelShape]] = {
    "llama": _llama,
    "llama4": _llama4,
    "llama4_text": _llama4,
    "mistral": _llama,
    "ministral": _llama,
    "mistral3": _llama,
    "granite": _llama,
    "smollm3": _llama,
    "mixtral": _mixtral,
    "qwen2": lambda config: _llama(config, qkv_bias=True),
    "qwen2_vl_text": lambda config: _llama(config, qkv_bias=True),
    "qwen2_5_vl_text": lambda config: _llama(config, qkv_bias=True),
    "qwen2_moe": lambda config: _qwen_experts(config, qkv_bias=True),
    "qwen3": lambda config: _llama(config, qk_norm=True),
    "qwen3_moe": lambda config: _qwen_experts(config, qk_norm=True),
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gemma": _gemma,
    "gemma2": lambda config: _gemma(config, post_norms=True),
    "gemma3": lambda config: _gemma(config, post_norms=True, qk_norm=True),
    "gemma3_text": lambda config: _gemma(config, post_norms=True, qk_norm=True),
    "phi3": lambda config: _llama(config, fused_qkv=True),
    "gpt2": _gpt2,
}
