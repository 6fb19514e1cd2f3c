"""Special tokens as the small files of a model declare them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from paceline.errors import InvalidError

CONFIG, ADDED, MAP = "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"
_NAMES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
# Named ones of a model, and unnamed ones, by release of transformers.
_NAMED, _UNNAMED = "model_specific_special_tokens", "additional_special_tokens"
_EITHER = "extra_special_tokens"
_DECODER = "added_tokens_decoder"


def read_object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """A small file; empty if there is none.

    Raises:
        InvalidError: it is not JSON.
    """
    if name not in files:
        return {}
    try:
        found: dict[str, Any] = json.loads(files[name])
    except ValueError as error:
        raise InvalidError(f"model.path: {name} is not JSON: {error}") from None
    return found


def read_settings(files: Mapping[str, bytes]) -> dict[str, Any]:
    """`tokenizer_config.json` with what transformers takes from `special_tokens_map.json`."""
    settings = read_object(files, CONFIG)
    return settings if _DECODER in settings else settings | read_object(files, MAP)


def texts_by_name(settings: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that a chat template sees as variables."""
    named = {name: settings[name] for name in _NAMES if settings.get(name)}
    for key in (_NAMED, _EITHER):
        more = settings.get(key)
        named |= more if isinstance(more, dict) else {}
    return {name: _text(token) for name, token in named.items()}


def check_tokens(
    fast: FastTokenizer,
    files: Mapping[str, bytes],
    settings: Mapping[str, Any],
    templates: Sequence[str],
) -> None:
    """Check that text has the tokens that it was trained with, each time.

    Raises:
        InvalidError: the chat template shows a token that `tokenizer.json` would cut into pieces,
            as it is declared elsewhere only; or text is cut at random, or special tokens always.
    """
    if dropout := getattr(fast.model, "dropout", None):
        raise InvalidError(
            f"model.path: tokenizer.json: dropout is {dropout:g}, so the same text would get other "
            "tokens each time; allowed: null"
        )
    if settings.get("split_special_tokens"):
        raise InvalidError(
            f"model.path: {CONFIG}: split_special_tokens is true, so no turn would end; allowed: "
            "false"
        )
    for where, text, name in _declared(files, settings):
        shown = text and any(text in each or (name and name in each) for each in templates)
        if shown and not _is_one(fast, text):
            raise InvalidError(
                f"model.path: tokenizer.json does not have {text!r} as a token of its own, which "
                f"{where} declares and the chat template shows: it would be cut into pieces; "
                "save the tokenizer with save_pretrained of transformers, which writes it there"
            )


def _declared(
    files: Mapping[str, bytes], settings: Mapping[str, Any]
) -> Iterator[tuple[str, str, str]]:
    """File and field, text and, if it is a variable of templates, name of each token."""
    for name, text in texts_by_name(settings).items():
        yield f"{CONFIG} ({name})", text, name
    decoder = settings.get(_DECODER)
    for token in decoder.values() if isinstance(decoder, dict) else ():
        yield f"{CONFIG} ({_DECODER})", _text(token), ""
    for key in (_UNNAMED, _EITHER):
        unnamed = settings.get(key)
        for token in unnamed if isinstance(unnamed, list) else ():
            yield f"{CONFIG} ({key})", _text(token), ""
    for text in read_object(files, ADDED):
        yield ADDED, text, ""


def _is_one(fast: FastTokenizer, text: str) -> bool:
    return fast.encode(text, add_special_tokens=False).ids == [fast.token_to_id(text)]


def _text(token: Any) -> str:
    """The text of a special token, given as a string or as an object with `content`."""
    return str(token["content"] if isinstance(token, dict) else token)
