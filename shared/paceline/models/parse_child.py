"""Reads JSON of models within limits, with the standard library alone.

The pieces are the parts of a call; its answer has `value`, or `wrong` with `at`, the number of a
piece that cannot be read.
"""

from __future__ import annotations

import json
import os
import re
import resource
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from paceline.isolation.child import ServedCall, serve

_MEMORY_BYTES = 1 << 30
_CPU_S = 20
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_MOST_EXPERTS = 4096
_DECLARED = (
    *("model_type", "vocab_size", "max_position_embeddings", "layer_types", "eos_token_id"),
    *_EXPERTS,
    "use_bidirectional_attention",
    *("n_shared_experts", "shared_expert_intermediate_size", "first_k_dense_replace"),
    "mlp_only_layers",
    *("rope_parameters", "rope_scaling", "original_max_position_embeddings"),
    *("n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx"),
    *("num_hidden_layers", "n_layer", "num_attention_heads"),
)
_MOST_CHARS = 16_384
TENSORS = Path(__file__).with_name("layer_tensors.json")
"""What each model of a family has at least: the ends of names outside of its layers, and the names
within each layer, in files or as in memory; `dense`: of a layer without experts; `tied`: whether
its head is its embedding, and the size of its attention heads, if config.json does not say."""

UNIFORM = frozenset(
    {
        *("arcee", "cohere", "cohere2", "ernie4_5", "gemma", "gemma2", "gemma3", "gemma3_text"),
        *("glm", "glm4", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "granite", "granitemoe"),
        *("helium", "llama", "ministral", "mistral", "mixtral", "olmo", "olmo2", "olmo3", "olmoe"),
        *("opt", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss"),
        *("smollm3", "stablelm", "starcoder2"),
    }
)
"""Values of `model_type` all of whose layers of a kind have the same tensors."""
LAYER = re.compile(r"(?:(.*?)\.)?(layers|h|blocks)\.(\d{1,6})\.(.+)")
# In names of parts that are no layers of the text model.
_BESIDE = re.compile(r"vision|visual|vit|audio|speech|encoder|tower|image|video|talker|mtp")
# Buffers, which some releases of transformers have saved.
_BUFFER = re.compile(r"(inv_freq|position_ids|(^|\.)(attn|attention)\.(masked_)?bias)$")
EMBEDDING = re.compile(r"(?:.*\.)?(embed_tokens|wte|embed_in|word_embeddings)\.weight")
HEAD = re.compile(r"(?:.*\.)?(lm_head|embed_out)\.weight")
_PROJECTION = re.compile(r"(?:.*\.)?(?:self_attn|mlp)\.(q|k|v|gate|up|down)_proj\.weight")
_WEIGHT = re.compile(r"(weight|bias|weight_packed|qzeros|_blocks)$")
_FLOAT = re.compile(r"BF16|F16|F32|F64")
# Of libraries that wrap a model, and of its layers when they have more than weights and biases.
_WRAPPED = re.compile(r"(module|_orig_mod|_fsdp_wrapped_module|base_model)\.")
_BESIDE_WEIGHT = re.compile(r".*_proj\.(?!(weight|bias)$).*")


_UNREADABLE = (ValueError, KeyError, IndexError, AttributeError, TypeError, RecursionError)


def main() -> None:
    """Serve one function for each kind of pieces."""
    os.nice(10)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
    serve({what: partial(_read, function) for what, function in _READERS.items()})


def _read(
    function: Callable[[Iterable[bytes]], dict[str, Any]], call: ServedCall
) -> dict[str, Any]:
    return function(call.parts.values())


def _names(pieces: Iterable[bytes]) -> dict[str, Any]:
    """The files that the index of safetensors names, sorted, and what its names lack.

    Pieces: the index, and `config.json`.
    """
    index, config = pieces
    try:
        listed: dict[str, str] = json.loads(index)["weight_map"]
        files = sorted(set(map(str, listed.values())))
        problems = list(_problems(_text_part(config), dict.fromkeys(listed)))
    except _UNREADABLE as error:
        return _wrong(0, error)
    return {"value": [files, problems]}


def _headers(pieces: Iterable[bytes]) -> dict[str, Any]:
    """Where the last tensor of each safetensors file ends, and what the tensors lack.

    Pieces: `config.json`, the index (an empty object: none), and the header of each file.
    """
    config, index, *texts = pieces
    ends: list[int] = []
    tensors: dict[str, Any] = {}
    for at, text in enumerate(texts):
        try:
            header: dict[str, Any] = json.loads(text)
            header.pop("__metadata__", None)
            ends.append(max((int(each["data_offsets"][1]) for each in header.values()), default=0))
            tensors |= {name: _remembered(name, each) for name, each in header.items()}
        except _UNREADABLE as error:
            return _wrong(at, error)
    try:
        listed = json.loads(index).get("weight_map", {})
    except _UNREADABLE:  # it was read before
        listed = {}
    problems = [*_absent(listed, tensors), *_problems(_text_part(config), tensors)]
    return {"value": [ends, problems]}


def _remembered(name: str, tensor: dict[str, Any]) -> tuple[str, list[int]] | None:
    """Type and shape of the tensors for which they are compared; of others, none is kept."""
    wanted = any(each.fullmatch(name) for each in (EMBEDDING, HEAD, _PROJECTION))
    dtype = str(tensor["dtype"])
    if wanted or not _FLOAT.match(dtype):
        return dtype, [int(size) for size in tensor["shape"]]
    return None


def _absent(listed: Mapping[str, object], tensors: Mapping[str, object]) -> Iterator[str]:
    absent = [name for name in listed if name not in tensors]
    if absent:
        yield f"the files lack {absent[0]}{_more(absent)}, which the index names"


def _problems(text: Mapping[str, Any], tensors: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with tensors, by name, of a model with this text configuration.

    A tensor is None, or (type, shape) where these are known and may be wrong.
    """
    uniform = str(text.get("model_type")) in UNIFORM
    own = {name: each for name, each in tensors.items() if not _BESIDE.search(name)}
    yield from _layer_problems(text, own, uniform=uniform)
    known = {name: each for name, each in own.items() if each is not None}
    for name, (_, shape) in known.items():
        if EMBEDDING.fullmatch(name) or HEAD.fullmatch(name):
            yield from _shape_problems(text, name, shape, uniform=uniform)
    if uniform:
        yield from _projection_problems(text, {name: shape for name, (_, shape) in known.items()})
    whole = [n for n, (dtype, _) in known.items() if not _FLOAT.match(dtype) and _is_weight(n)]
    if whole:
        yield (
            f"{whole[0]}{_more(whole)} is {known[whole[0]][0]}, which is no type of floats: "
            "quantised weights cannot be trained; allowed: F32, BF16 or F16"
        )
    if uniform and own and not any(map(EMBEDDING.fullmatch, own)):
        yield "the files have no embedding (such as model.embed_tokens.weight)"
    if other := [name for name in own if _WRAPPED.match(name)]:
        yield (
            f"{other[0]}{_more(other)} has the name of a wrapper ({other[0].partition('.')[0]}); "
            "save the model itself"
        )
    if other := [name for name in own if _BESIDE_WEIGHT.fullmatch(name)]:
        yield (
            f"{other[0]}{_more(other)} is neither weight nor bias of a layer: merge adapters into "
            "the weights, and dequantise these"
        )
    if uniform and own:
        yield from _outside(text, own)
    untied = uniform and own and not _is_tied(text)
    if untied and not any(map(HEAD.fullmatch, own)):
        yield (
            "the files have no lm_head.weight, and by config.json tie_word_embeddings is false "
            "(what it says, or the default of its family)"
        )


def _is_tied(text: Mapping[str, Any]) -> bool:
    tied = text.get("tie_word_embeddings")
    return bool(_row(text)["tied"]) if tied is None else tied is not False


def _row(text: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of a family in `UNIFORM`."""
    found: dict[str, Any] = json.loads(TENSORS.read_bytes())[str(text["model_type"])]
    return found


def _is_weight(name: str) -> bool:
    return bool(_WEIGHT.search(name)) and not _BUFFER.search(name)


def _layer_problems(
    text: Mapping[str, Any], tensors: Iterable[str], *, uniform: bool
) -> Iterator[str]:
    layers = _layers(tensors)
    if layers is None:
        return
    num = _first_integer(text, "num_hidden_layers", "n_layer")
    if num is not None and layers:
        # Layers that predict further tokens come after the others, and are not trained.
        most = num + (_first_integer(text, "num_nextn_predict_layers") or 0)
        says = f"config.json says num_hidden_layers {num}"
        if beyond := sorted(at for at in layers if at >= most):
            name = min(layers[beyond[0]])
            yield f"the files have layer {beyond[0]}{_more(beyond)} ({name}), but {says}"
        if lacking := [at for at in range(num) if at not in layers]:
            yield f"the files lack layer {lacking[0]}{_more(lacking)}, and {says}"
    if num is not None and uniform and not layers and any(True for _ in tensors):
        yield f"the files have no layers, but config.json says num_hidden_layers {num}"
    if uniform:
        own = {at: each for at, each in layers.items() if at < (num or at + 1)}
        lacking = list(_lacking(text, own))
        yield from lacking or _uneven(text, own)


def _layers(tensors: Iterable[str]) -> dict[int, frozenset[str]] | None:
    """The tensors of each layer of the text model; None if it is not clear which they are."""
    found: dict[str, dict[int, set[str]]] = {}
    for name in tensors:
        if (match := LAYER.fullmatch(name)) and not _BUFFER.search(name):
            prefix, kind, at, rest = match.groups()
            found.setdefault(f"{prefix}.{kind}", {}).setdefault(int(at), set()).add(rest)
    most = max(map(len, found.values()), default=0)
    longest = [layers for layers in found.values() if len(layers) == most]
    if len(longest) > 1:
        return None
    return {at: frozenset(each) for layers in longest for at, each in layers.items()}


def _outside(text: Mapping[str, Any], names: Iterable[str]) -> Iterator[str]:
    """What every model of this family has beside layers, embedding and head."""
    kind = str(text["model_type"])
    ends = [name for name in names if not LAYER.fullmatch(name)]
    for wanted in _row(text)["outer"]:
        if not any(name == wanted or name.endswith(f".{wanted}") for name in ends):
            yield f"the files lack {wanted}, which every {kind} model has"
            return


def _lacking(text: Mapping[str, Any], layers: Mapping[int, frozenset[str]]) -> Iterator[str]:
    """What every model of this family has, and these layers lack."""
    kind = str(text["model_type"])
    row = _row(text)
    num_experts = min(_first_integer(text, *_EXPERTS) or 1, _MOST_EXPERTS)
    forms = [list(_with_experts(form, num_experts)) for form in row["layer"]]
    found: list[str] = []
    for at, names in sorted(layers.items()):
        allowed = [*forms, row["dense"]] if "dense" in row and _may_be_dense(text, at) else forms
        likely = max(allowed, key=lambda form: sum(name in names for name in form))
        found += (f"{name} of layer {at}" for name in likely if name not in names)
    if found:
        yield f"the files lack {found[0]}{_more(found)}, which every {kind} model has"


def _with_experts(names: Iterable[str], num: int) -> Iterator[str]:
    for name in names:
        if "*" in name:
            yield from (name.replace("*", str(at)) for at in range(num))
        else:
            yield name


def _may_be_dense(text: Mapping[str, Any], at: int) -> bool:
    """Whether a layer of Qwen's may be without experts, as transformers decides it."""
    listed = text.get("mlp_only_layers")
    step = _first_integer(text, "decoder_sparse_step") or 1
    dense = isinstance(listed, list) and at in listed
    return dense or (at + 1) % step != 0 or _first_integer(text, "num_experts") == 0


def _uneven(text: Mapping[str, Any], layers: Mapping[int, frozenset[str]]) -> Iterator[str]:
    """A layer with only some of the tensors that another one of its kind has."""
    kinds: Any = text.get("layer_types")
    first: dict[tuple[str, frozenset[str]], int] = {}
    for at, names in sorted(layers.items()):
        kind = str(kinds[at]) if isinstance(kinds, list) and at < len(kinds) else ""
        first.setdefault((kind, names), at)
    for (kind, names), at in first.items():
        for (other_kind, others), other in first.items():
            if kind == other_kind and names < others:
                lacking = sorted(others - names)
                yield f"layer {at} lacks {lacking[0]}{_more(lacking)}, which layer {other} has"
                return


def _shape_problems(
    text: Mapping[str, Any], name: str, shape: Sequence[int], *, uniform: bool
) -> Iterator[str]:
    vocab_size = _first_integer(text, "vocab_size")
    hidden_size = _first_integer(text, "hidden_size", "n_embd")
    rows, width = shape if len(shape) == 2 else (0, 0)
    what = f"{name} has the shape {list(shape)}, but config.json says"
    if vocab_size is not None and (rows != vocab_size if uniform else rows < vocab_size):
        yield f"{what} vocab_size {vocab_size}"
    elif uniform and hidden_size not in (None, width) and "word_embed_proj_dim" not in text:
        yield f"{what} hidden_size {hidden_size}"


def _projection_problems(
    text: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]
) -> Iterator[str]:
    """The first layer that has other heads or another width between its attention."""
    hidden, inner, heads, kv_heads, head_dim = (
        _first_integer(text, name)
        for name in (
            *("hidden_size", "intermediate_size", "num_attention_heads"),
            *("num_key_value_heads", "head_dim"),
        )
    )
    row = _row(text)
    if hidden and heads:
        head_dim = head_dim or row["head_dim"] or hidden // heads
    key = (kv_heads if row["grouped"] else heads), head_dim
    gate = inner, 1
    rows = {
        "q": (heads, head_dim),
        "k": key,
        "v": key,
        "gate": gate,
        "up": gate,
        "down": (hidden, 1),
    }
    for name, shape in shapes.items():
        if match := _PROJECTION.fullmatch(name):
            num, size = rows[match.group(1)]
            columns = inner if match.group(1) == "down" else hidden
            if num and size and columns and list(shape) != [num * size, columns]:
                yield (
                    f"{name} has the shape {list(shape)}, but by config.json (hidden_size "
                    f"{hidden}, intermediate_size {inner}, num_attention_heads {heads}, "
                    f"num_key_value_heads {kv_heads}, head_dim {head_dim}) it is "
                    f"[{num * size}, {columns}]"
                )
                return


def _text_part(config: bytes) -> dict[str, Any]:
    """The part of `config.json` that is about text; empty if it cannot be read."""
    try:
        whole = json.loads(config)
    except (ValueError, RecursionError):
        return {}
    nested = whole.get("text_config") if isinstance(whole, dict) else None
    return {
        **cast("dict[str, Any]", whole if isinstance(whole, dict) else {}),
        **cast("dict[str, Any]", nested if isinstance(nested, dict) else {}),
    }


def _first_integer(text: Mapping[str, Any], *keys: str) -> int | None:
    return next((value for key in keys if type(value := text.get(key)) is int), None)


def _more(found: Sequence[object]) -> str:
    return f" and {len(found) - 1} more" if len(found) > 1 else ""


def _vocabulary(pieces: Iterable[bytes]) -> dict[str, Any]:
    """The size of the vocabulary by `config.json`, and the highest id of `tokenizer.json`."""
    parsed: list[Any] = []
    for at, text in enumerate(pieces):
        try:
            parsed.append(json.loads(text))
        except RecursionError:
            return {"wrong": "is nested too deeply", "at": at}
        except ValueError as error:
            return {"wrong": f"is not JSON: {error}", "at": at}
    config, tokenizer = parsed
    if not isinstance(config, dict) or not isinstance(tokenizer, dict):
        return {"value": [None, -1]}  # whoever reads them will say what is wrong
    text = cast("dict[str, Any]", config)
    nested = text.get("text_config")
    size = text.get("vocab_size", nested.get("vocab_size") if isinstance(nested, dict) else None)
    highest = _highest_id(cast("dict[str, Any]", tokenizer))
    return {"value": [size if isinstance(size, int) else None, highest]}


def _highest_id(tokenizer: dict[str, Any]) -> int:
    """The highest id of a tokenizer's own vocabulary; -1 if it does not say.

    Added tokens do not count: some models have one that the text model is never shown.
    """
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    vocabulary = cast("dict[str, Any]", model).get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):  # of Unigram: pairs in the order of their ids
        return len(cast("list[Any]", vocabulary)) - 1
    if not isinstance(vocabulary, dict):
        return -1
    entries = cast("Sequence[Any]", added if isinstance(added, list) else [])
    others = {_integer(each.get("id")) for each in entries if isinstance(each, dict)}
    values = cast("dict[str, Any]", vocabulary).values()
    return max({_integer(each) for each in values} - others, default=-1)


def _integer(value: object) -> int:
    return value if isinstance(value, int) else -1


def _declared(pieces: Iterable[bytes]) -> dict[str, Any]:
    """What `config.json` and `generation_config.json` say of a model's limits, by key.

    Of `config.json` those of its text part, if it has one; a key that it lacks is not there.
    """
    found = list[dict[str, Any]]()
    for at, text in enumerate(pieces):
        try:
            parsed = json.loads(text)
        except RecursionError:
            return {"wrong": "is nested too deeply", "at": at}
        except ValueError as error:
            return {"wrong": f"is not JSON: {error}", "at": at}
        if not isinstance(parsed, dict):
            return {"wrong": "is no object", "at": at}
        found.append(cast("dict[str, Any]", parsed))
    config, generation = found
    nested = config.get("text_config")
    text = {**config, **cast("dict[str, Any]", nested if isinstance(nested, dict) else {})}
    declared = {key: text[key] for key in _DECLARED if key in text}
    if generation.get("eos_token_id") is not None:
        declared["generation_eos_token_id"] = generation["eos_token_id"]
    return {"value": {key: _short(value) for key, value in declared.items()}}


def _short(value: Any) -> Any:
    """A value, or how a message would quote it if it is long."""
    return value if len(json.dumps(value)) <= _MOST_CHARS else f"{str(value)[:100]}..."


def _wrong(at: int, error: Exception) -> dict[str, Any]:
    return {"wrong": f"{type(error).__name__}: {error}"[:500], "at": at}


_READERS = {
    "names": _names,
    "headers": _headers,
    "vocabulary": _vocabulary,
    "declared": _declared,
}
