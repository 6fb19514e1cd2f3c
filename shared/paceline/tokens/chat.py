"""Tokenizer and chat template from a model's small files, compatible with Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import DecodeStream

from paceline.enums import TokenSource
from paceline.errors import InvalidError
from paceline.plugins import Message
from paceline.tokens.special import check_tokens, read_object, read_settings, texts_by_name
from paceline.types import TokenSpan

At = Callable[[str], None]
TEMPLATE, TOKENIZER = "chat template", "tokenizer.json"
# What a template raises, whatever it does; a sandbox of Jinja lets it compute anything.
_RAISED = (
    jinja2.TemplateError,
    *(ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError),
)
_BLANKS = ("\u2581", "\u0120", " ")  # of SentencePiece, of byte-level BPE
_ANCHORS = (".", "a", "0", "\n")  # one of them is not joined with what follows
_GIVEN = {"messages", "tools", "xml_tools", "documents", "add_generation_prompt", "strftime_now"}


class UnreadableTokenizerError(InvalidError):
    """There is no `tokenizer.json`, or it cannot be read."""


class RejectedMessagesError(InvalidError):
    """The chat template rejects the messages; it may accept others."""


def nowhere(part: str) -> None:
    """For callers that need not know which part is at work."""


class Tokenizer:
    """Converts text to tokens and back, and renders dialogues with the model's chat template."""

    def __init__(
        self,
        *,
        fast: FastTokenizer,
        special: dict[str, str],
        template: str,
        eos: tuple[int, ...],
        tool_template: str = "",
    ) -> None:
        """`tool_template`: for dialogues with tools, if the model has one of its own for them."""
        self._fast = fast
        self._changes_ends = _changes_ends(fast)
        self._special = special
        self._template = _compile(template) if template else None
        self._tool_template = _compile(tool_template) if tool_template else self._template
        self.eos = eos

    @classmethod
    def from_files(cls, files: Mapping[str, bytes], *, at: At = nowhere) -> Tokenizer:
        """Build one from the files of a model folder, by name: `tokenizer.json` and others.

        `at` is told which of them is read next, as it may not return.

        Raises:
            UnreadableTokenizerError: tokenizer.json is missing or cannot be read.
            InvalidError: other files do not fit to it, or the chat template cannot be read.
        """
        at(TOKENIZER)
        if "tokenizer.json" not in files:
            raise UnreadableTokenizerError(
                "model.path: no tokenizer.json; save a fast tokenizer with "
                "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
        try:
            fast = FastTokenizer.from_str(files["tokenizer.json"].decode())
        except Exception as error:  # the supervisor boundary of tokenizers, which raises just that
            raise UnreadableTokenizerError(
                f"model.path: tokenizer.json cannot be read: {error}"
            ) from None
        fast.no_padding()
        fast.no_truncation()
        settings = read_settings(files)
        special = texts_by_name(settings)
        templates = _templates(files, settings)
        check_tokens(fast, files, settings, list(templates.values()))
        at(TEMPLATE)
        return cls(
            fast=fast,
            special={name: text for name, text in special.items() if name not in _GIVEN},
            template=templates.get("default", ""),
            tool_template=templates.get("tool_use", ""),
            eos=_eos(files, fast, special),
        )

    @property
    def chat(self) -> bool:
        """Whether the model has a chat template."""
        return self._template is not None

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Tokens of a text; `special` adds the tokenizer's special tokens, such as BOS."""
        return self._fast.encode(text, add_special_tokens=special).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special tokens."""
        return self._fast.decode(tokens, skip_special_tokens=True)

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """The text that each token adds, special tokens included; joined, the text of all.

        A token that ends within a character adds nothing, and the one that completes it all of it.
        """
        stream = DecodeStream(skip_special_tokens=False)
        return [stream.step(self._fast, token) or "" for token in tokens]

    def turn_text(self, tokens: Sequence[int], *, keep_special: bool) -> str:
        """The text of a sampled turn, without its end token.

        `keep_special` keeps special tokens: some models mark their calls of tools with them.
        """
        if not keep_special:
            return self.decode(tokens)
        ended = bool(tokens) and tokens[-1] in self.eos
        return self._fast.decode(tokens[:-1] if ended else tokens, skip_special_tokens=False)

    def token(self, index: int) -> str:
        """The token with this id as text, special or not."""
        return self._fast.id_to_token(index) or ""

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        now: datetime | None = None,
        prompt: bool = True,
    ) -> str:
        """Render a dialogue up to the start of the policy's turn, or without it if not `prompt`.

        `now`: the time that the template sees.

        Raises:
            RejectedMessagesError: the template rejects the messages.
            InvalidError: there is no template, or it calls itself without end.
        """
        template = self._tool_template if tools else self._template
        if template is None:
            raise InvalidError("the model has no chat template")
        offered = [dict(tool) for tool in tools] or None
        try:
            return template.render(
                messages=list(map(_for_template, messages)),
                tools=offered,
                xml_tools=offered,  # what the template of SmolLM3 calls them
                documents=None,
                add_generation_prompt=prompt,
                strftime_now=(now or datetime.now()).strftime,
                **self._special,
            )
        except RecursionError as error:
            raise InvalidError(f"model.path: chat template: {error}") from None
        except _RAISED as error:
            raise RejectedMessagesError(f"model.path: chat template: {error}") from None

    def encoded(self, text: str) -> Encoded:
        """Tokens of a text that begins a dialogue."""
        encoded = self._fast.encode(text, add_special_tokens=False)
        return Encoded(text, encoded.ids, encoded.offsets)

    def continued(self, text: str) -> Encoded:
        """Tokens of a text that follows another.

        Tokenizers of SentencePiece's kind put a blank before what they take for a whole text, so
        it is tokenised behind a character.

        Raises:
            InvalidError: the tokenizer joins the text with whatever it follows, or changes the ends
                of what it takes for a whole text.
        """
        if self._changes_ends:
            raise InvalidError(
                "model.path: tokenizer.json: its normalizer changes the ends of a text (Strip, "
                "Prepend), so that a dialogue in turns would have other tokens than its whole; "
                "only tasks with one turn can be trained with it"
            )
        if not self._prefixes_blank():
            return self.encoded(text)
        for anchor in _ANCHORS:
            before = self._fast.encode(anchor, add_special_tokens=False).ids
            encoded = self._fast.encode(anchor + text, add_special_tokens=False)
            skip = len(before)
            if encoded.ids[:skip] == before:
                offsets = [(a - len(anchor), b - len(anchor)) for a, b in encoded.offsets[skip:]]
                return Encoded(text, encoded.ids[skip:], offsets)
        raise InvalidError(
            f"model.path: tokenizer.json: {text[:40]!r} has no tokens of its own behind other text"
        )

    def is_special(self, token: int) -> bool:
        """Whether it ends turns or is a special token, so that no text merges with it."""
        added = self._fast.get_added_tokens_decoder().get(token)
        return token in self.eos or (added is not None and added.special)

    def _prefixes_blank(self) -> bool:
        """Whether a blank is put before a text."""
        first = self._fast.encode("!", add_special_tokens=False).tokens[:1]
        return bool(first) and first[0].startswith(_BLANKS)


class Encoded:
    """Tokens of a text, and the characters [start, end) of each."""

    __slots__ = ("_text", "ids", "offsets")

    def __init__(self, text: str, ids: list[int], offsets: list[tuple[int, int]]) -> None:
        self._text = text
        self.ids = ids
        self.offsets = offsets

    def rendered(self, messages: Sequence[Message], *, skip: int = 0) -> Rendered:
        """The tokens but the first `skip`, with their sources.

        What lies inside a message's content is of the environment or a tool, else of the template.
        """
        sources = _sources(self._text, messages, self.offsets)
        return Rendered(tuple(self.ids[skip:]), tuple(_spans(sources[skip:])))


class Rendered:
    """New tokens to show to the policy, with their sources."""

    __slots__ = ("spans", "tokens")

    def __init__(self, tokens: tuple[int, ...], spans: tuple[TokenSpan, ...]) -> None:
        self.tokens = tokens
        self.spans = spans


def _changes_ends(fast: FastTokenizer) -> bool:
    """Whether text is normalised otherwise at its ends; a blank that is put before it is known."""
    if fast.normalizer is None:
        return False
    alone, within = map(fast.normalizer.normalize_str, ("\n.\n", "q\n.\nq"))
    within = within[within.startswith(_BLANKS) :].removeprefix("q").removesuffix("q")
    return alone not in {within, *(blank + within for blank in _BLANKS)}


def _for_template(message: Message) -> dict[str, Any]:
    """A message as templates see it; some ask whether a field is defined."""
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    more: dict[str, Any] = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "tool_calls": [dict(call) for call in message.tool_calls],
    }
    return plain | {key: value for key, value in more.items() if value}


def _sources(
    text: str, messages: Sequence[Message], offsets: Sequence[tuple[int, int]]
) -> list[TokenSource]:
    """The source of each token: a tool or the environment if it lies inside a message's content."""
    ranges: list[tuple[int, int, TokenSource]] = []
    at = 0
    for message in messages:
        source = TokenSource.TOOL if message.role == "tool" else TokenSource.ENVIRONMENT
        if (place := place_of(message.content, text, at)) is not None:
            at = place[1]
            ranges.append((*place, source))
    return [_source(ranges, start, end) for start, end in offsets]


def place_of(content: str, text: str, start: int) -> tuple[int, int] | None:
    """Characters [start, end) at which a text shows a message's content; None: it does not.

    Blanks at its ends do not count, and some templates show what a tool answers as a JSON string.
    """
    content = content.strip()
    for shown in (content, json.dumps(content, ensure_ascii=False)[1:-1]):
        if (at := text.find(shown, start)) >= 0:
            return at, at + len(shown)
    return None


def _source(ranges: Sequence[tuple[int, int, TokenSource]], start: int, end: int) -> TokenSource:
    for low, high, source in ranges:
        if low <= start < end <= high:
            return source
    return TokenSource.TEMPLATE


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
    functions: dict[str, Any] = {"raise_exception": _raise_exception}
    environment.globals.update(functions)
    try:
        return environment.from_string(template)
    except _RAISED as error:  # parts without variables are computed at once
        raise InvalidError(f"model.path: the chat template cannot be read: {error}") from None


class _Generation(Extension):
    """The tag `{% generation %}`, which marks assistant text and does not affect rendering."""

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


def _templates(files: Mapping[str, bytes], config: dict[str, Any]) -> dict[str, str]:
    """The chat templates by name; most models have only a default."""
    if "chat_template.jinja" in files:
        return {"default": files["chat_template.jinja"].decode()}
    found = config.get("chat_template") or ""
    if isinstance(found, list):
        named = {item["name"]: item["template"] for item in found}
        if named and "default" not in named:
            raise InvalidError(
                f"model.path: tokenizer_config.json: chat_template has the names {sorted(named)}, "
                "and none is 'default', which all dialogues without tools need"
            )
        return named
    return {"default": str(found)}


def _eos(
    files: Mapping[str, bytes], fast: FastTokenizer, special: dict[str, str]
) -> tuple[int, ...]:
    """Tokens that end a turn: the model's own list and the tokenizer's end token."""
    name = "generation_config.json"
    listed = read_object(files, name).get("eos_token_id")
    if listed is None:
        name = "config.json"
        listed = read_object(files, name).get("eos_token_id")
    found: list[int] = [*listed] if isinstance(listed, list) else [] if listed is None else [listed]
    if not all(type(each) is int and each >= 0 for each in found):
        raise InvalidError(
            f"model.path: {name}: eos_token_id is {listed!r}; an id or a list of ids is needed"
        )
    own = fast.token_to_id(special["eos_token"]) if special.get("eos_token") else None
    if own is None and listed is None and special.get("eos_token"):
        raise InvalidError(
            f"model.path: tokenizer.json does not have the eos_token {special['eos_token']!r}, so "
            "no turn of the policy would end; add the token, or eos_token_id to "
            "generation_config.json"
        )
    if own is not None and own not in found:
        found.append(own)
    return tuple(found)
