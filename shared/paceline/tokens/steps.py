"""An observation on its way to the tokenizer, with the dialogue before it."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from paceline.errors import LimitError
from paceline.plugins import Message

# Placeholder for a sampled turn in a rendered dialogue, so that no template sees, edits or drops
# sampled text.
TURN = "\u2042paceline-turn\u2042"
TAIL_TOKENS = 16  # more than an end of turn has


@dataclass(frozen=True, slots=True)
class RenderedPrefix:
    """What was rendered of a dialogue so far: its number of characters, and their CRC-32."""

    length: int = 0
    crc: int = 0

    @classmethod
    def of(cls, text: str) -> RenderedPrefix:
        """That of a text."""
        return cls(len(text), zlib.crc32(text.encode(errors="surrogatepass")))


@dataclass(frozen=True, slots=True)
class DialogueStep:
    """An observation and the dialogue before it: all that rendering it takes."""

    messages: tuple[Message, ...]  # of the whole dialogue
    num_new: int  # of these, the last ones are those of the observation
    text: str  # for models without a chat template; empty: the contents of the new messages
    tools: tuple[Mapping[str, Any], ...]
    offers_tools: bool  # with this observation
    num_turns: int  # of the policy
    turn_tail: tuple[int, ...]  # the last tokens of the last one, at most `TAIL_TOKENS`
    prefix: RenderedPrefix
    now: datetime
    max_bytes: int | None  # of its text

    @property
    def new(self) -> tuple[Message, ...]:
        """The messages of the observation."""
        return self.messages[len(self.messages) - self.num_new :]

    def check_size(self, *texts: str) -> None:
        """Raise `LimitError` for texts that are longer together than an observation may be."""
        if self.max_bytes is None:
            return
        num_bytes = sum(len(text.encode("utf-8", "replace")) for text in texts)
        if num_bytes > self.max_bytes:
            raise LimitError(
                f"limit prompt_bytes: an observation has {num_bytes} bytes, but this installation "
                f"allows {self.max_bytes}; make the tasks shorter, or ask its operator to raise "
                "`limits.prompt_bytes`"
            )
