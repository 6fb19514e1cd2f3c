"""Tokenizer and chat template from a model's small files, compatible with Hugging Face."""

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

# Placeholder for a sampled turn in a rendered dialogue, so that no template sees, edits or drops
# sampled text.
_TURN = "\u2042paceline-turn\u2042"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


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
        self._special = special
        self._template = _compile(template) if template else None
        self._tool_template = _compile(tool_template) if tool_template else self._template
        self.eos = eos

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> Tokenizer:
        """Build one from the files of a model folder, by name: `tokenizer.json` and others.

        Raises:
            InvalidError: tokenizer.json is missing or cannot be read.
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
        templates = _templates(files, config)
        return cls(
            fast=fast,
            special=special,
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
    ) -> str:
        """Render a dialogue up to the start of the policy's turn.

        `now`: the time that the template sees.

        Raises:
            InvalidError: the template rejects the messages.
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
                add_generation_prompt=True,
                strftime_now=(now or datetime.now()).strftime,
                **self._special,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise InvalidError(f"chat template: {error}") from None

    def rendered(self, text: str, messages: Sequence[Message]) -> Rendered:
        """Tokens of a text: of the environment or a tool in `messages`, else of the template."""
        encoded = self._fast.encode(text, add_special_tokens=False)
        sources = _sources(text, messages, encoded.offsets)
        return Rendered(tuple(encoded.ids), tuple(_spans(sources)))


class Rendered:
    """New tokens to show to the policy, with their sources."""

    __slots__ = ("spans", "tokens")

    def __init__(self, tokens: tuple[int, ...], spans: tuple[TokenSpan, ...]) -> None:
        self.tokens = tokens
        self.spans = spans


class Dialogue:
    """Renders the observations of an episode incrementally.

    Later renderings contain a placeholder for each sampled turn, whose tokens are in the
    transcript. `turn` ends the policy's turn, `show` renders the observation that follows.
    """

    def __init__(self, tokenizer: Tokenizer, *, max_bytes: int | None = None) -> None:
        """`max_bytes` limits the text of one observation."""
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._messages: list[Message] = []
        self._tools: tuple[Mapping[str, Any], ...] = ()
        self._before = ""
        self._turns = 0
        self._end = ""
        self._now = datetime.now()  # a template with the date must not change at midnight

    def show(self, observation: Observation) -> Rendered:
        """Tokens of an observation, given everything before it.

        Raises:
            InvalidError: the template cannot be rendered incrementally, or not with these tools.
            LimitError: the observation is too long.
        """
        self._check_size(observation.text, *(m.content for m in observation.messages))
        if observation.tools:
            self._offer(observation)
        if not self._tokenizer.chat or not observation.messages:
            return self._plain(observation)
        self._messages.extend(observation.messages)
        text = self._tokenizer.render(self._messages, tools=self._tools, now=self._now)
        if observation.tools and text == self._tokenizer.render(self._messages, now=self._now):
            raise InvalidError(
                "model.path: the chat template ignores `tools`, which this environment offers; "
                "use a model whose template renders them"
            )
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
        return self._tokenizer.rendered(delta, observation.messages)

    def _offer(self, observation: Observation) -> None:
        if self._turns:
            raise InvalidError("environment: tools: only the first observation may have any")
        if not self._tokenizer.chat:
            raise InvalidError(
                "model.path: the model has no chat template, but this environment offers tools"
            )
        if not observation.messages:
            raise InvalidError("environment: tools: such an observation needs `messages` too")
        for index, tool in enumerate(observation.tools):
            if not _is_function(tool):
                raise InvalidError(
                    f"environment: tools[{index}]: {str(tool)[:200]}; allowed: {{type: function, "
                    "function: {name, description, parameters}}"
                )
        self._tools = observation.tools

    def _check_size(self, *texts: str) -> None:
        if self._max_bytes is None:
            return
        num_bytes = sum(len(text.encode("utf-8", "replace")) for text in texts)
        if num_bytes > self._max_bytes:
            raise LimitError(
                f"limit prompt_bytes: an observation has {num_bytes} bytes, but this installation "
                f"allows {self._max_bytes}; make the tasks shorter, or ask its operator to raise "
                "`limits.prompt_bytes`"
            )

    def turn(self, last_token: int) -> None:
        """End the policy's turn; its last token may be the template's end-of-turn token."""
        self._turns += 1
        self._messages.append(Message("assistant", _TURN))
        ended = last_token in self._tokenizer.eos
        self._end = self._tokenizer.token(last_token) if ended else ""

    def _plain(self, observation: Observation) -> Rendered:
        text = observation.text or "\n".join(m.content for m in observation.messages)
        tokens = tuple(self._tokenizer.encode(text, special=not self._turns))
        return Rendered(tokens, (TokenSpan(0, len(tokens), TokenSource.ENVIRONMENT),))


def _for_template(message: Message) -> dict[str, str]:
    """A message as templates see it; some ask whether a field is defined."""
    plain = {"role": message.role, "content": message.content}
    more = {"name": message.name, "tool_call_id": message.tool_call_id}
    return plain | {key: value for key, value in more.items() if value}


def _is_function(tool: Mapping[str, Any]) -> bool:
    function = tool.get("function")
    named = isinstance(function, Mapping) and isinstance(function.get("name"), str)
    return tool.get("type") == "function" and named


def _sources(
    text: str, messages: Sequence[Message], offsets: Sequence[tuple[int, int]]
) -> list[TokenSource]:
    """The source of each token: a tool or the environment if it lies inside a message's content."""
    ranges: list[tuple[int, int, TokenSource]] = []
    at = 0
    for message in messages:
        content = message.content.strip()
        source = TokenSource.TOOL if message.role == "tool" else TokenSource.ENVIRONMENT
        # Some templates show what a tool answers as a JSON string.
        for shown in (content, json.dumps(content, ensure_ascii=False)[1:-1]):
            found = text.find(shown, at)
            if found >= 0:
                at = found + len(shown)
                ranges.append((found, at, source))
                break
    return [_source(ranges, start, end) for start, end in offsets]


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
    except jinja2.TemplateError as error:
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


def _json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    if name not in files:
        return {}
    try:
        found: dict[str, Any] = json.loads(files[name])
    except ValueError as error:
        raise InvalidError(f"model.path: {name} is not JSON: {error}") from None
    return found


def _content(token: Any) -> str:
    """The text of a special token, given as a string or as an object with `content`."""
    return str(token["content"] if isinstance(token, dict) else token)


def _templates(files: Mapping[str, bytes], config: dict[str, Any]) -> dict[str, str]:
    """The chat templates by name; most models have only a default."""
    if "chat_template.jinja" in files:
        return {"default": files["chat_template.jinja"].decode()}
    found = config.get("chat_template") or ""
    if isinstance(found, list):
        return {item["name"]: item["template"] for item in found}
    return {"default": str(found)}


def _eos(
    files: Mapping[str, bytes], fast: FastTokenizer, special: dict[str, str]
) -> tuple[int, ...]:
    """Tokens that end a turn: the model's own list and the tokenizer's end token."""
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
