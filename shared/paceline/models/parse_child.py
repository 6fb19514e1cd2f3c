"""Reads JSON of models within limits: run as a script, with the standard library alone.

Its input is a line of JSON, `what` and the `sizes` of the pieces that follow; its answer is a line
of JSON: `value`, or `wrong` with `at`, the number of a piece that cannot be read.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Iterable, Sequence
from typing import Any, cast

_MEMORY_BYTES = 1 << 30
_CPU_S = 20
_DECLARED = (
    *("model_type", "vocab_size", "max_position_embeddings", "layer_types", "eos_token_id"),
    *("num_experts", "num_local_experts", "n_routed_experts", "use_bidirectional_attention"),
    *("n_shared_experts", "shared_expert_intermediate_size", "first_k_dense_replace"),
    "mlp_only_layers",
    *("rope_parameters", "rope_scaling", "original_max_position_embeddings"),
    "n_positions",
)
_MOST_CHARS = 16_384


def main() -> None:
    """Answer one request."""
    os.nice(10)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
    request = json.loads(sys.stdin.buffer.readline())
    pieces = (sys.stdin.buffer.read(size) for size in request["sizes"])
    print(json.dumps(_READERS[request["what"]](pieces)))


def _names(pieces: Iterable[bytes]) -> dict[str, Any]:
    """The files that the index of safetensors names, sorted."""
    try:
        listed = json.loads(next(iter(pieces)))["weight_map"]
        return {"value": sorted(set(map(str, listed.values())))}
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        return _wrong(0, error)


def _ends(pieces: Iterable[bytes]) -> dict[str, Any]:
    """Where the last tensor of each safetensors file ends, by their headers."""
    found: list[int] = []
    for at, text in enumerate(pieces):
        try:
            header: dict[str, Any] = json.loads(text)
            tensors = (each for name, each in header.items() if name != "__metadata__")
            found.append(max((int(each["data_offsets"][1]) for each in tensors), default=0))
        except (ValueError, KeyError, IndexError, AttributeError, TypeError, RecursionError) as e:
            return _wrong(at, e)
    return {"value": found}


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


_READERS = {"names": _names, "ends": _ends, "vocabulary": _vocabulary, "declared": _declared}

if __name__ == "__main__":
    main()
