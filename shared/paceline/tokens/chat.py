"""Tokenizer and chat template from a model's small files, rendered as Hugging Face does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer

from paceline.enums import TokenSource
from paceline.errors import InvalidError, LimitError
from paceline.plugins import Message, Observation
from paceline.types import TokenSpan

# Stands for a sampled turn while a dialogue is rendered, so that no template ever sees, edits
# or drops sampled text.
_TURN = "\u2042paceline-turn\u2042"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


class Tokenizer:
    """Text to tokens and back; `chat` says whether the model has a chat template."""

    def __init__(
        self, *, fast: FastTokenizer, special: dict[str, str], template: str, eos: tuple[int, ...]
    ) -> None:
        self._fast = fast
        self._special = special
        self._template = _compile(template) if template else None
        self.eos = eos

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> Tokenizer:
        """From file contents by name: `tokenizer.json` and what else a model folder has.

        Raises:
            InvalidError: there is no tokenizer.json, or it cannot be read.
        """
        if "tokenizer.json" not in files:
            raise InvalidError(
                "model.path: no tokenizer.json; save a fast tokenizer with "
                "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
        try:
            fast = FastTokenizer.from_str(files["tokenizer.json"].decode())
        except Exception as error:  # tokenizers raises plain Exception
            raise InvalidError(f"model.path: tokenizer.json cannot be read: {error}") from None
        fast.no_padding()
        fast.no_truncation()
        config = {
            **_json(files, "special_tokens_map.json"),
            **_json(files, "tokenizer_config.json"),
        }
        special = {name: _content(config[name]) for name in _SPECIAL if config.get(name)}
        return cls(
            fast=fast,
            special=special,
            template=_template(files, config),
            eos=_eos(files, fast, special),
        )

    @property
    def chat(self) -> bool:
        """Whether there is a chat template."""
        return self._template is not None

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Tokens of a text; `special` adds what the tokenizer puts around a whole text."""
        return self._fast.encode(text, add_special_tokens=special).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without special tokens."""
        return self._fast.decode(tokens, skip_special_tokens=True)

    def token(self, index: int) -> str:
        """The token itself, special or not."""
        return self._fast.id_to_token(index) or ""

    def render(self, messages: Sequence[Message]) -> str:
        """The dialogue up to where the policy speaks.

        Raises:
            InvalidError: the template refuses the messages.
        """
        if self._template is None:
            raise InvalidError("the model has no chat template")
        plain = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return self._template.render(
                messages=plain,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise InvalidError(f"chat template: {error}") from None

    def rendered(self, text: str, contents: Sequence[str]) -> Rendered:
        """Tokens of rendered text: the contents are the environment's, the rest is template."""
        encoded = self._fast.encode(text, add_special_tokens=False)
        sources = _sources(text, contents, encoded.offsets)
        return Rendered(tuple(encoded.ids), tuple(_spans(sources)))


class Rendered:
    """What the policy is shown next: new tokens only, and whose they are."""

    __slots__ = ("spans", "tokens")

    def __init__(self, tokens: tuple[int, ...], spans: tuple[TokenSpan, ...]) -> None:
        self.tokens = tokens
        self.spans = spans


class Dialogue:
    """Renders observations one after the other, each time only what is new.

    A sampled turn is a placeholder in every later rendering: what the policy said is in the
    transcript as tokens. `turn` ends a turn, `show` renders the answer to it.
    """

    def __init__(self, tokenizer: Tokenizer, *, max_bytes: int | None = None) -> None:
        """With `max_bytes` no longer text of one observation is tokenised."""
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._messages: list[Message] = []
        self._before = ""
        self._turns = 0
        self._end = ""

    def show(self, observation: Observation) -> Rendered:
        """Tokens of an observation, after all that was shown and said before.

        Raises:
            InvalidError: the template cannot be rendered incrementally.
            LimitError: it is too long.
        """
        self._check_size(observation.text, *(m.content for m in observation.messages))
        if not self._tokenizer.chat or not observation.messages:
            return self._plain(observation)
        new = [message.content for message in observation.messages]
        self._messages.extend(observation.messages)
        text = self._tokenizer.render(self._messages)
        if self._turns:
            before = self._before + _TURN
            if not text.startswith(before):
                raise InvalidError(
                    "the chat template rewrites earlier turns when a later one is added, so it "
                    "cannot be rendered incrementally; multi-turn environments need one that can"
                )
            delta = text.removeprefix(before).removeprefix(self._end)
        else:
            delta = text
        self._before = text
        self._check_size(delta)
        return self._tokenizer.rendered(delta, new)

    def _check_size(self, *texts: str) -> None:
        if self._max_bytes is None:
            return
        num_bytes = sum(len(text.encode("utf-8", "replace")) for text in texts)
        if num_bytes > self._max_bytes:
            raise LimitError(
                f"limit prompt_bytes: {num_bytes} bytes of one observation, and this installation "
                f"allows {self._max_bytes}; make the tasks shorter, or ask its operator to raise "
                "`limits.prompt_bytes`"
            )

    def turn(self, last_token: int) -> None:
        """The policy has spoken; its last token may be the end of turn that the template has."""
        self._turns += 1
        self._messages.append(Message("assistant", _TURN))
        ended = last_token in self._tokenizer.eos
        self._end = self._tokenizer.token(last_token) if ended else ""

    def _plain(self, observation: Observation) -> Rendered:
        text = observation.text or "\n".join(m.content for m in observation.messages)
        tokens = tuple(self._tokenizer.encode(text, special=not self._turns))
        return Rendered(tokens, (TokenSpan(0, len(tokens), TokenSource.ENVIRONMENT),))


def _sources(
    text: str, contents: Sequence[str], offsets: Sequence[tuple[int, int]]
) -> list[TokenSource]:
    """Whose each token is: a token that begins inside a content is the environment's."""
    ranges: list[tuple[int, int]] = []
    at = 0
    for content in contents:
        found = text.find(content.strip(), at)
        if found >= 0:
            at = found + len(content.strip())
            ranges.append((found, at))
    return [
        TokenSource.ENVIRONMENT
        if any(low <= start and end <= high and end > start for low, high in ranges)
        else TokenSource.TEMPLATE
        for start, end in offsets
    ]


def _spans(sources: Sequence[TokenSource]) -> list[TokenSpan]:
    spans: list[TokenSpan] = []
    for at, source in enumerate(sources):
        if spans and spans[-1].source is source:
            spans[-1] = TokenSpan(spans[-1].start, at + 1, source)
        else:
            spans.append(TokenSpan(at, at + 1, source))
    return spans


def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    functions: dict[str, Any] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(functions)
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise InvalidError(f"model.path: the chat template cannot be read: {error}") from None


class _Generation(Extension):
    """`{% generation %}` marks what an assistant said; rendering is not changed by it."""

    tags = {"generation"}  # noqa: RUF012 the base class declares it so

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    if name not in files:
        return {}
    try:
        found: dict[str, Any] = json.loads(files[name])
    except ValueError as error:
        raise InvalidError(f"model.path: {name} is not JSON: {error}") from None
    return found


def _content(token: Any) -> str:
    """A special token is written as a string or as an object with `content`."""
    return str(token["content"] if isinstance(token, dict) else token)


def _template(files: Mapping[str, bytes], config: dict[str, Any]) -> str:
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"].decode()
    found = config.get("chat_template") or ""
    if isinstance(found, list):
        named: dict[str, str] = {item["name"]: item["template"] for item in found}
        return named.get("default", "")
    return str(found)


def _eos(
    files: Mapping[str, bytes], fast: FastTokenizer, special: dict[str, str]
) -> tuple[int, ...]:
    """What ends a turn: the model's own list and the tokenizer's end token."""
    listed = _json(files, "generation_config.json").get("eos_token_id")
    if listed is None:
        listed = _json(files, "config.json").get("eos_token_id")
    found: list[int] = (
        [] if listed is None else [listed] if isinstance(listed, int) else list(listed)
    )
    own = fast.token_to_id(special["eos_token"]) if "eos_token" in special else None
    if own is not None and own not in found:
        found.append(own)
    return tuple(found)
