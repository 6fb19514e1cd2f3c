"""Tiny configurations of many model families, each with what sets its attention apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 37
WINDOW = 8  # tokens: shorter than the sequences of tests, so that it shows
_PLAIN: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_MOE: dict[str, Any] = {
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "num_experts": 4,
    "num_local_experts": 4,
}
_MLA: dict[str, Any] = {
    **_MOE,
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_LINEAR: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


_SPECIAL: dict[str, Any] = dict.fromkeys(
    ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0
)


def _scaled_rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, **more}}


# Name -> model type and what differs from a plain Llama of two layers.
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_head_dim": ("llama", {"head_dim": 20}),
    "llama_linear_rope": ("llama", _scaled_rope("linear")),
    "llama_yarn": ("llama", _scaled_rope("yarn", original_max_position_embeddings=16)),
    "llama_llama3_rope": (
        "llama",
        _scaled_rope(
            "llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
        ),
    ),
    "llama_dynamic_rope": (
        "llama",
        {"max_position_embeddings": 16, **_scaled_rope("dynamic")},
    ),
    "phi3_longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 4,
                "long_factor": [4.0] * 4,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral_window": ("mistral", {"sliding_window": WINDOW}),
    "mixtral_window": ("mixtral", {"sliding_window": WINDOW, **_MOE}),
    "ministral_window": ("ministral", {"sliding_window": WINDOW, "head_dim": 8}),
    "starcoder2_window": ("starcoder2", {"sliding_window": WINDOW}),
    "phi3_window": ("phi3", {"sliding_window": WINDOW}),
    "phimoe_window": ("phimoe", {"sliding_window": WINDOW, **_MOE}),
    "qwen2": ("qwen2", {}),
    "qwen2_window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen2_moe": ("qwen2_moe", {**_MOE, "shared_expert_intermediate_size": 16}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3_moe": ("qwen3_moe", {**_MOE, "head_dim": 16}),
    "qwen3_next": ("qwen3_next", {**_MOE, **_LINEAR, "shared_expert_intermediate_size": 16}),
    "qwen3_5": ("qwen3_5_text", _LINEAR),
    "gemma": ("gemma", {"head_dim": 8}),
    "gemma2": ("gemma2", {"head_dim": 8, "sliding_window": WINDOW, "query_pre_attn_scalar": 8}),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 8,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 8,
            "num_hidden_layers": 6,
        },
    ),
    "gemma3_bidirectional": (
        "gemma3_text",
        {"head_dim": 8, "sliding_window": WINDOW, "use_bidirectional_attention": True},
    ),
    "gpt_oss": ("gpt_oss", {**_MOE, "head_dim": 16, "sliding_window": WINDOW}),
    "cohere": ("cohere", {"logit_scale": 0.25}),
    "cohere2": ("cohere2", {"sliding_window": WINDOW, "num_hidden_layers": 4}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": WINDOW, "num_hidden_layers": 4}),
    "olmoe": ("olmoe", _MOE),
    "exaone4": ("exaone4", {"sliding_window": WINDOW, "num_hidden_layers": 4}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "granite": (
        "granite",
        {
            "logits_scaling": 8.0,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.0625,
        },
    ),
    "granitemoe": ("granitemoe", _MOE),
    "phi": ("phi", {"partial_rotary_factor": 0.5}),
    "stablelm": ("stablelm", {"partial_rotary_factor": 0.25}),
    "nemotron": ("nemotron", {}),
    "glm": ("glm", {"head_dim": 8}),
    "glm4": ("glm4", {"head_dim": 8}),
    "glm4_moe": ("glm4_moe", {**_MLA, "head_dim": 16}),
    "deepseek_v2": ("deepseek_v2", _MLA),
    "deepseek_v3": ("deepseek_v3", _MLA),
    "llama4": (
        "llama4_text",
        {**_MOE, "head_dim": 8, "attention_chunk_size": WINDOW, "num_hidden_layers": 4},
    ),
    "gpt2": ("gpt2", {}),
    "gpt_neo": (
        "gpt_neo",
        {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    ),
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.25}),
    "gptj": ("gptj", {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}),
    "gpt_bigcode": ("gpt_bigcode", {}),
    "codegen": ("codegen", {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.1}),
    "bloom": ("bloom", {"n_layer": 2, "n_head": 4}),
    "falcon": ("falcon", {}),
    "falcon_alibi": ("falcon", {"alibi": True}),
    "mpt": ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128}),
    "persimmon": ("persimmon", {}),
    "bamba": ("bamba", {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1}),
    "jamba": ("jamba", _MOE),
    "mamba": ("mamba", {}),
    "recurrent_gemma": ("recurrent_gemma", {"attention_window_size": WINDOW}),
    "modernbert_decoder": (
        "modernbert-decoder",
        {"local_attention": WINDOW, "global_attn_every_n_layers": 2, **_SPECIAL},
    ),
    "lfm2": ("lfm2", {"num_hidden_layers": 4}),
    "ernie4_5": ("ernie4_5", {}),
    "hunyuan": ("hunyuan_v1_dense", {"head_dim": 8}),
    "seed_oss": ("seed_oss", {"head_dim": 8}),
    "arcee": ("arcee", {}),
    "apertus": ("apertus", {}),
    "diffllama": ("diffllama", {}),
    "helium": ("helium", {"head_dim": 8}),
    "minimax": ("minimax", {**_MOE, "head_dim": 8}),
}
# Attention of their own, sinks, outputs of another kind.
REFUSED_BY_TRAINER = (
    *("gpt_oss", "llama4", "gpt_neo", "bloom", "falcon", "falcon_alibi", "mpt", "recurrent_gemma"),
    "modernbert_decoder",
)
_LINEAR_LAYERS = ("qwen3_next", "qwen3_5", "bamba", "jamba", "mamba", "recurrent_gemma", "minimax")
# The same, layers of other kinds, positions scaled by length, attention to later tokens.
REFUSED_BY_ENGINE = (
    *_LINEAR_LAYERS,
    *("gpt_oss", "gpt_neo", "bloom", "falcon", "falcon_alibi", "mpt", "modernbert_decoder"),
    *("llama_dynamic_rope", "phi3_longrope", "gemma3_bidirectional"),
)
UNSHARED = ("deepseek_v2", "deepseek_v3", "diffllama")  # attention changes what is cached
# Files have other names, or other tensors, than the model in memory.
CONVERTED = (
    *("qwen3_moe", "mixtral_window", "deepseek_v3", "glm4_moe", "qwen2_moe", "olmoe"),
    *("phimoe_window", "granitemoe", "gpt_neox"),
)
NOISY = ("gpt2", "opt", "mixtral_window", "phimoe_window", "starcoder2_window", "llama")
NAMES = tuple(_FAMILIES)
TRAINED = tuple(name for name in NAMES if name not in REFUSED_BY_TRAINER)
SERVED = tuple(name for name in NAMES if name not in REFUSED_BY_ENGINE)


def config_of(family: str) -> Any:
    """The configuration of a family's tiny model."""
    kind, differs = _FAMILIES[family]
    return AutoConfig.for_model(kind, **{**_PLAIN, **differs})


def save_family(family: str, folder: Path, *, noise: float = 0.0) -> Path:
    """Save a model whose tensors are all far from their initial values.

    `noise`: the rate of every kind of dropout and jitter in its configuration.
    """
    config = config_of(family)
    for name, value in list(vars(config).items()):
        if isinstance(value, float) and ("drop" in name or "jitter" in name):
            setattr(config, name, noise)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # saved, but not trained
                buffer.add_(torch.randn_like(buffer) * 0.1)
    model.save_pretrained(folder)
    return folder


def tokens_of(family: str, *, rows: int, columns: int) -> torch.Tensor:
    """Random tokens, [rows, columns], the same for a family each time."""
    generator = torch.Generator().manual_seed(NAMES.index(family))
    return torch.randint(0, VOCAB, (rows, columns), generator=generator)
