"""Transcripts as coloured text: who said it, how likely it was, which weights sampled it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from rich.text import Text

from paceline.enums import TokenSource
from paceline.platform.text import visible
from paceline.types import TokenSpan, Transcript

Colouring = Literal["source", "logprob", "version"]
Pieces = Callable[[Sequence[int]], list[str]]
"""The text of each token of a span."""
SOURCES = {
    TokenSource.POLICY: "green",
    TokenSource.ENVIRONMENT: "cyan",
    TokenSource.TOOL: "magenta",
    TokenSource.TEMPLATE: "bright_black",
    TokenSource.EXPERT: "blue",
}
# By the probability of a token; the bins are fixed, so that siblings compare.
HEAT = (
    (0.9, "bright_black"),
    (0.5, "green"),
    (0.2, "yellow"),
    (0.1, "dark_orange"),
    (0.01, "red"),
    (0.001, "bold red"),
    (0.0, "bold white on red"),
)
VERSIONS = ("green", "yellow", "cyan", "magenta", "blue", "dark_orange")
_NEUTRAL = "bright_black"
_ROLES = {"assistant": "green", "user": "cyan", "system": "cyan", "tool": "magenta"}


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token of the policy."""

    logprob: float
    version: int


def numbered(tokens: Sequence[int]) -> list[str]:
    """For a reader without the model's tokenizer: the ids."""
    return [f"{token} " for token in tokens]


def transcript_text(transcript: Transcript, *, color: Colouring, pieces: Pieces) -> Text:
    """One line per span: its source, its number of tokens and what was said, coloured."""
    if transcript.messages:
        return messages_text(transcript)
    text = Text()
    sampled = iter(_sampled(transcript))
    for span in transcript.spans:
        count = span.end - span.start
        own = [next(sampled) for _ in range(count)] if _is_policy(span) else []
        text.append(f"  {span.source.value:<11}", SOURCES.get(span.source, ""))
        text.append(f"{count:>5}  ", "dim")
        text.append_text(_reply_text(transcript, span, own, color=color, pieces=pieces))
        text.append(_about(own) + "\n", "dim italic")
    return text


def messages_text(transcript: Transcript) -> Text:
    """One line per message of an outside endpoint's dialogue, whose tokens are not known."""
    text = Text()
    for message in json.loads(transcript.messages):
        role = message["role"]
        text.append(f"  {visible(role):<11}", _ROLES.get(role, ""))
        called = [json.dumps(call["function"]) for call in message.get("tool_calls", ())]
        said = "\n".join(filter(None, (message["content"], *called)))
        text.append(_one_line(said) + "\n", _ROLES.get(role, ""))
    return text


def legend(color: Colouring) -> Text:
    """The meaning of the colours."""
    text = Text("  ")
    if color == "logprob":
        for least, style in HEAT:
            text.append(f" p≥{least:g} ", style)
    elif color == "version":
        text.append("each version has a colour; │v12│ marks where it begins to sample", "dim")
    else:
        for source, style in SOURCES.items():
            text.append(f" {source.value} ", style)
    return text


def heat(logprob: float) -> str:
    """The style of a token with this log-prob."""
    probability = math.exp(min(logprob, 0.0)) if not math.isnan(logprob) else 0.0
    return next(style for least, style in HEAT if probability >= least)


def _reply_text(
    transcript: Transcript,
    span: TokenSpan,
    own: Sequence[SampledToken],
    *,
    color: Colouring,
    pieces: Pieces,
) -> Text:
    parts = pieces(transcript.tokens[span.start : span.end])
    if color == "source" or not own:
        style = SOURCES.get(span.source, "") if color == "source" else _NEUTRAL
        return Text(_one_line("".join(parts)), style)
    if color == "logprob":
        text = Text()
        for part, token in zip(parts, own, strict=True):
            text.append(_one_line(part), heat(token.logprob))
        return text
    return _by_version(parts, own)


def _by_version(parts: Sequence[str], own: Sequence[SampledToken]) -> Text:
    text = Text()
    runs = groupby(zip(parts, own, strict=True), key=lambda pair: pair[1].version)
    for version, run in runs:
        text.append(f"│v{version}│", "bold")
        said = "".join(part for part, _ in run)
        text.append(_one_line(said), VERSIONS[version % len(VERSIONS)])
    return text


def _sampled(transcript: Transcript) -> Iterator[SampledToken]:
    versions = (run.version for run in transcript.versions for _ in range(run.count))
    yield from map(SampledToken, transcript.logprobs, versions)


def _about(own: Sequence[SampledToken]) -> str:
    if not own:
        return ""
    versions = sorted({token.version for token in own})
    span = f"v{versions[0]}" if len(versions) == 1 else f"v{versions[0]}-{versions[-1]}"
    return f"   {span}, lowest log-prob {min(token.logprob for token in own):.2f}"


def _is_policy(span: TokenSpan) -> bool:
    return span.source is TokenSource.POLICY


def _one_line(text: str) -> str:
    """With marks for line ends, since a line is a span."""
    return visible(text).replace("\n", "⏎").replace("\t", "⇥")
