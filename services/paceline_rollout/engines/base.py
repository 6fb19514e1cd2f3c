"""What engines share: outputs and their queue, stop strings, detokenization."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from paceline.enums import FinishReason
from paceline.plugins import EngineOutput, EngineRequest, error_output
from paceline.types import VersionRun

Decode = Callable[[list[int]], str]
Encode = Callable[[str], list[int]]


def version_gone(request: EngineRequest, active: int) -> EngineOutput:
    """The error of a request whose pinned version is no longer served."""
    text = f"pinned_version: {request.pinned_version} is gone; version {active} is active"
    return error_output(request.request_id, "FAILED_PRECONDITION", text)


def emit(
    request_id: str,
    tokens: Sequence[int],
    logprobs: Sequence[float],
    *,
    version: int,
    reason: FinishReason | None = None,
    matched: str = "",
) -> EngineOutput:
    """Tokens sampled by one version."""
    runs = (VersionRun(version, len(tokens)),) if tokens else ()
    return EngineOutput(
        request_id=request_id,
        tokens=tuple(tokens),
        logprobs=tuple(logprobs),
        versions=runs,
        finish_reason=reason,
        matched_stop=matched,
    )


def uniform_logprob(vocab_size: int) -> float:
    """The log-prob of every token under a uniform policy."""
    return -math.log(vocab_size)


def decoder(folder: Path | None) -> Decode | None:
    """A function from token ids to text; None if the folder has no tokenizer."""
    tokenizer = _tokenizer(folder)
    return None if tokenizer is None else partial(tokenizer.decode, skip_special_tokens=False)


def encoder(folder: Path | None) -> Encode | None:
    """A function from text to token ids, none added; None if the folder has no tokenizer."""
    tokenizer = _tokenizer(folder)
    if tokenizer is None:
        return None
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def _tokenizer(folder: Path | None) -> Any:
    if folder is None or not (folder / "tokenizer.json").exists():
        return None
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def stop_window(strings: Sequence[str]) -> int:
    """How many newest tokens to decode: a stop of n bytes spans at most n tokens."""
    return max(len(text.encode()) for text in strings) + 4


def stop_in(text: str, strings: Sequence[str]) -> str:
    """The first stop string that occurs in a text; empty if none does."""
    return next((stop for stop in strings if stop in text), "")


class OutputQueue:
    """Outputs for a single consumer, which receives all that are queued as one batch."""

    def __init__(self) -> None:
        self._outputs: list[EngineOutput] = []
        self._wake = asyncio.Event()
        self._closed = False

    def put(self, batch: Sequence[EngineOutput]) -> None:
        """Queue outputs; call it on the event loop's thread."""
        self._outputs.extend(batch)
        self._wake.set()

    def close(self) -> None:
        """End `batches` after what is queued."""
        self._closed = True
        self._wake.set()

    async def batches(self) -> AsyncIterator[list[EngineOutput]]:
        """Outputs since the last batch; ends after `close`."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._outputs:
                batch, self._outputs = self._outputs, []
                yield batch
            if self._closed and not self._outputs:
                return
