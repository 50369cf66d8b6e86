"""Known models by name and by their configuration, against the parameters that are published of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tracekit.errors import InputError, UsageError
from tracekit.estimate.hardware import hardware, hardware_of
from tracekit.estimate.huggingface import read_config, shape_of
from tracekit.estimate.parameters import elements_of
from tracekit.estimate.presets import PRESETS, preset
from tracekit.estimate.shape import parameters

#: Billions of parameters, of the models' cards and papers.
PUBLISHED = {
    "gpt2": 0.124, "gpt2-xl": 1.558, "llama2-7b": 6.738, "llama2-13b": 13.016, "llama2-70b": 68.977, "llama3-8b": 8.030,
    "llama3-70b": 70.554, "llama3-405b": 405.853, "llama3.2-1b": 1.236, "llama3.2-3b": 3.213, "mixtral-8x7b": 46.703,
    "mixtral-8x22b": 140.630, "qwen2.5-7b": 7.616, "qwen2.5-72b": 72.706, "qwen3-8b": 8.191, "qwen3-32b": 32.762,
    "qwen3-30b-a3b": 30.532, "qwen3-235b-a22b": 235.094, "deepseek-v2-lite": 15.706, "deepseek-v2": 235.741, "deepseek-v3": 671.026,
    "gemma2-9b": 9.242, "gemma2-27b": 27.227, "gemma3-27b": 27.009, "llama4-scout": 107.77, "llama4-maverick": 400.71,
}  # fmt: skip


@pytest.mark.parametrize(("name", "billions"), PUBLISHED.items())
def test_known_models_have_their_published_parameters(name: str, billions: float) -> None:
    assert elements_of(parameters(preset(name))) / 1e9 == pytest.approx(billions, abs=0.006 if billions > 10 else 0.0006)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("meta-llama/Llama-3.1-8B", "llama3-8b"),
        ("Meta-Llama-3-70B-Instruct", "llama3-70b"),
        ("LLAMA3_405B", "llama3-405b"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"),
        ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
        ("deepseek-ai/DeepSeek-R1", "deepseek-v3"),
        ("google/gemma-2-9b-it", "gemma2-9b"),
    ],
)
def test_names_in_any_spelling(written: str, name: str) -> None:
    assert preset(written) is PRESETS[name]


def test_a_word_that_is_nearly_one_is_guessed() -> None:
    with pytest.raises(UsageError, match="did you mean llama3-8b"):
        preset("lama3-8b")
    with pytest.raises(UsageError, match="did you mean h100"):
        hardware("h10")
    assert hardware("RTX 4090").name == "RTX 4090"
    found = hardware_of("NVIDIA GeForce RTX 4090")
    assert found is not None and found.name == "RTX 4090"


LLAMA = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336}
CONFIGS = {
    "llama3-8b": {"model_type": "llama", **LLAMA, "vocab_size": 128256, "max_position_embeddings": 131072},
    "mixtral-8x7b": {"model_type": "mixtral", **LLAMA, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "intermediate_size": 6144, "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "qwen2.5-7b": {
        "model_type": "qwen2", "num_hidden_layers": 28, "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4,
        "intermediate_size": 18944, "vocab_size": 152064,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128, "num_key_value_heads": 128,
        "intermediate_size": 18432, "vocab_size": 129280, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
        "n_shared_experts": 1, "first_k_dense_replace": 3, "moe_layer_freq": 1,
    },
    "llama4-maverick": {
        "model_type": "llama4",
        "text_config": {
            "model_type": "llama4_text", "num_hidden_layers": 48, "hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 8,
            "head_dim": 128, "intermediate_size": 8192, "intermediate_size_mlp": 16384, "vocab_size": 202048, "num_local_experts": 128,
            "num_experts_per_tok": 1, "interleave_moe_layer_step": 2,
        },
    },
    "gemma2-9b": {
        "model_type": "gemma2", "num_hidden_layers": 42, "hidden_size": 3584, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 256, "intermediate_size": 14336, "vocab_size": 256000,
    },
    "gpt2-xl": {"model_type": "gpt2", "n_layer": 48, "n_embd": 1600, "n_head": 25, "n_positions": 1024, "vocab_size": 50257},
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_is_the_model_that_it_describes(name: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS[name]))
    assert parameters(read_config(str(path))) == parameters(preset(name))


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"model_type": "bert"}, "models of type 'bert' are not known"),
        ({"model_type": "lama", **LLAMA}, "models of type 'lama' are not known"),
        ({"model_type": "llama", **LLAMA}, "vocab_size is not given"),
        ({"model_type": "llama", **LLAMA, "vocab_size": "many"}, "vocab_size is no whole number"),
        ({"model_type": "llama", **LLAMA, "vocab_size": -5}, "vocab_size is no whole number"),
        ({}, "models of type ''"),
    ],
)
def test_what_a_configuration_lacks_is_said(config: dict[str, object], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        shape_of(config)


#: Small models of transformers 5.24: keys that differ from the family's usual ones, and the elements of all parameters there.
_SMALL = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 160,
    "vocab_size": 512, "max_position_embeddings": 256,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
OTHERS = [
    ({"model_type": "qwen2_moe", "num_experts": 8, **_EXPERTS, "head_dim": 8, "shared_expert_intermediate_size": 64}, 355_520),
    ({"model_type": "qwen3_moe", "num_local_experts": 8, **_EXPERTS}, 346_816),
    ({"model_type": "qwen3_moe", "num_experts": 8, **_EXPERTS, "mlp_only_layers": [0, 1]}, 308_928),
    ({"model_type": "granite"}, 229_952),
    ({"model_type": "smollm3", "tie_word_embeddings": True}, 197_184),
    ({"model_type": "mistral3", "text_config": {"model_type": "mistral", "tie_word_embeddings": None}}, 229_952),
]


@pytest.mark.parametrize(("config", "elements"), OTHERS)
def test_keys_of_other_versions_and_relatives(config: dict[str, object], elements: int) -> None:
    assert elements_of(parameters(shape_of({**_SMALL, **config}))) == elements


def test_files_that_are_no_configuration(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for text in ("[1]", "{", "[" * 100_000, '{"model_type": "bert"}'):
        path.write_text(text)
        with pytest.raises(InputError, match=r"config\.json"):
            read_config(str(path))
    with pytest.raises(InputError, match="No such file"):
        read_config(str(tmp_path / "none.json"))
