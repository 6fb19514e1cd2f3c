"""Refuses at submit what a model's own small files say that its job cannot do."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, cast

from paceline.config import JobSpec
from paceline.config.base import PluginSpec
from paceline.config.sections.lora import LoraSpec
from paceline.errors import ConfigError
from paceline.errors.wording import shown
from paceline.models.families import (
    POSITIONS,
    UNSERVED,
    UNTRAINED,
    max_positions,
    trained_positions,
)
from paceline.models.parsing import ParseError, parse
from paceline.models.shallow import SERVED_LAYERS
from paceline.plugins import MAX_STOP_TOKENS

_FILES = ("config.json", "generation_config.json")
_TORCH = "torch"
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# Fields of configurations whose layers, or experts for all tokens, are linear layers.
_DENSE = (
    *("first_k_dense_replace", "mlp_only_layers"),
    *("n_shared_experts", "shared_expert_intermediate_size"),
)
# Fields of experts, which are no linear layers: one tensor has those of all experts of a layer.
_OF_EXPERTS = {"experts", "gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3"}


def check_model_limits(spec: JobSpec, files: Mapping[str, bytes]) -> int | None:
    """Compare a job with what `config.json` and `generation_config.json` say.

    Returns the size of the vocabulary; None: they do not say it.

    Raises:
        ConfigError: ids of the end of a turn are none, the model has fewer positions or other
            layers than the job needs, a family that cannot be computed, or experts that it would
            adapt; names the field, its value and what is allowed.
    """
    try:
        parsed = parse("declared", [files.get(name, b"{}") for name in _FILES])
    except ParseError as error:
        name = " and ".join(_FILES) if error.at is None else _FILES[error.at]
        raise ConfigError(f"model.path: {name} {error.message}") from None
    declared = cast("dict[str, Any]", parsed)
    problems = [*_end_problems(declared), *_lora_problems(declared, spec.trainer.lora)]
    if _is(declared, "model_type", UNTRAINED):
        problems.append(
            f"model.path: config.json: model_type {declared['model_type']!r}: the trainer cannot "
            "compute the log-probs of this family, as its attention or its head is its own; "
            "allowed: families with attention of transformers and a plain head, such as "
            "llama, qwen3, qwen3_moe, gemma3_text"
        )
    problems += _number_problems(declared)
    if spec.rollout.engine.kind == _TORCH:
        problems += _engine_problems(declared, spec.sampling.max_context)
    else:
        problems += _position_problems(declared, spec.sampling.max_context)
    problems += _shard_problems(declared, spec.rollout.engine)
    if problems:
        raise ConfigError("; ".join(problems))
    size = declared.get("vocab_size")
    return size if isinstance(size, int) else None


def _end_problems(declared: Mapping[str, Any]) -> Iterator[str]:
    """Ids that are none: engines compare them with those of sampled tokens."""
    where, value = "generation_config.json", declared.get("generation_eos_token_id")
    if value is None:
        where, value = "config.json", declared.get("eos_token_id")
    ids: list[Any] = cast("list[Any]", value) if isinstance(value, list) else [value]
    what = f"model.path: {where}: eos_token_id is {shown(str(value))}"
    size = declared.get("vocab_size")
    if value is None:
        return
    if not all(type(token) is int for token in ids):
        yield f"{what} ({type(value).__name__}); an id or a list of ids is needed"
    elif len(ids) > MAX_STOP_TOKENS:
        yield f"{what}; at most {MAX_STOP_TOKENS} ids are allowed"
    elif wrong := [
        token for token in ids if token < 0 or (isinstance(size, int) and token >= size)
    ]:
        most = f" to {size - 1}" if isinstance(size, int) else " and more"
        yield f"{what}: {wrong[0]} is not in the vocabulary; allowed: 0{most}"


def _lora_problems(declared: Mapping[str, Any], lora: LoraSpec | None) -> Iterator[str]:
    """Adapters are beside linear layers, and experts are none."""
    num = max((n for key in _EXPERTS if type(n := declared.get(key)) is int), default=0)
    if lora is None or num < 2:
        return
    has_dense = any(map(declared.get, _DENSE))  # then these names are of linear layers too
    for name in lora.target_modules:
        *owners, last = name.split(".")
        shared = any("shared" in owner for owner in owners)
        if name == "all-linear" or (last in _OF_EXPERTS and not shared and not has_dense):
            yield (
                f"trainer.lora.target_modules: {shown(name)}: experts cannot have adapters, and "
                f"config.json says that the model has {num}; allowed are linear layers beside "
                "them, such as q_proj, k_proj, v_proj and o_proj"
            )


def _number_problems(declared: Mapping[str, Any]) -> Iterator[str]:
    """Limits that are no numbers would limit nothing."""
    for key in ("vocab_size", "num_hidden_layers", "n_layer", *POSITIONS):
        value = declared.get(key)
        if value is not None and not (type(value) is int and value > 0):
            yield (
                f"model.path: config.json: {key} is {shown(str(value))} "
                f"({type(value).__name__}); allowed: a whole number above 0"
            )
    kinds, num = declared.get("layer_types"), declared.get("num_hidden_layers")
    if isinstance(kinds, list) and type(num) is int:
        num_kinds = len(cast("list[Any]", kinds))
        if num_kinds != num:
            yield (
                f"model.path: config.json: layer_types has {num_kinds} entries, and "
                f"num_hidden_layers is {num}; one for each layer is needed"
            )


def _position_problems(declared: Mapping[str, Any], max_context: int) -> Iterator[str]:
    """Problems with any engine: the trainer computes all positions too."""
    positions = trained_positions(declared)
    if positions < max_context:
        yield (
            f"sampling.max_context: {max_context}; the model has {positions:.0f} positions "
            f"(max_position_embeddings of config.json), so allowed: at most {positions:.0f}"
        )


def _shard_problems(declared: Mapping[str, Any], engine: PluginSpec) -> Iterator[str]:
    """Tensor parallel ranks have the same number of attention heads each."""
    ranks, heads = engine.options.get("tp"), declared.get("num_attention_heads")
    if type(ranks) is int and type(heads) is int and ranks > 0 and heads % ranks:
        yield (
            f"rollout.engine.tp: {ranks}; the model has {heads} attention heads "
            "(num_attention_heads of config.json), which cannot be shared out evenly; allowed: a "
            f"divisor of {heads}"
        )


def _engine_problems(declared: Mapping[str, Any], max_context: int) -> Iterator[str]:
    positions = max_positions(declared)
    if positions is not None and positions < max_context:
        yield (
            f"sampling.max_context: {max_context}; the model has {positions} positions "
            "(max_position_embeddings of config.json, or those before its RoPE is scaled by the "
            f"length), so allowed: at most {positions}"
        )
    if declared.get("use_bidirectional_attention") is True:
        yield (
            "model.path: config.json: use_bidirectional_attention is true, and the engine 'torch' "
            "attends to earlier tokens only; allowed: false; or another rollout.engine"
        )
    layers = declared.get("layer_types")
    kinds = (
        {str(layer) for layer in cast("list[Any]", layers)} if isinstance(layers, list) else set()
    )
    if other := sorted(kinds - SERVED_LAYERS):
        yield (
            f"model.path: config.json: layer_types has {other[0]!r}, which the engine 'torch' "
            f"lacks; allowed: {', '.join(sorted(SERVED_LAYERS))}; or another rollout.engine"
        )
    if _is(declared, "model_type", UNSERVED):
        yield (
            f"model.path: config.json: model_type {declared['model_type']!r}: the engine 'torch' "
            "cannot compute the log-probs of this family, which has layers without attention or "
            "attention of its own; allowed: other families, such as llama, qwen3, qwen3_moe, "
            "gemma3_text; or another rollout.engine"
        )


def _is(declared: Mapping[str, Any], key: str, among: Collection[str]) -> bool:
    value = declared.get(key)
    return isinstance(value, str) and value in among
