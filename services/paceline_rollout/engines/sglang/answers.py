"""From a request to SGLang's, and from SGLang's events to tokens, log-probs and versions."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.interfaces import Emission, Generation
from paceline.types import Sampling, VersionRun


@dataclass(slots=True, eq=False)
class Slot:
    """A request and what has come out of it, over one or more calls of the server."""

    request: Generation
    room: int  # tokens it may have in all
    tokens: list[int] = field(default_factory=list[int])
    rid: str = ""  # of the call that is open
    seen: int = 0  # tokens of that call
    version: int = -1  # active when it began
    task: asyncio.Task[None] | None = None
    aborted: bool = False
    again: bool = False  # interrupted, to go on under the next version

    @property
    def request_id(self) -> str:
        """The caller's name for it."""
        return self.request.request_id

    @property
    def left(self) -> int:
        """Tokens it may still have."""
        return self.room - len(self.tokens)


def body_of(slot: Slot, *, deterministic: bool) -> dict[str, Any]:
    """What to ask the server for."""
    return {
        "rid": slot.rid,
        "input_ids": [*slot.request.tokens, *slot.tokens],
        "sampling_params": _knobs(slot.request.sampling, slot.left, deterministic=deterministic),
        "return_logprob": True,
        "logprob_start_len": -1,
        # Prefixes are shared only among requests that began under one version.
        "extra_key": str(slot.version),
    }


def score_body(rid: str, tokens: Sequence[int], version: int) -> dict[str, Any]:
    """Log-probs of a prompt, without generating."""
    return {
        "rid": rid,
        "input_ids": list(tokens),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "extra_key": f"score-{version}",
    }


def take(slot: Slot, event: Mapping[str, Any]) -> Emission | None:
    """What an event brings, whether events grow or carry only what is new."""
    meta: Mapping[str, Any] = event["meta_info"]
    total = int(meta["completion_tokens"])
    fresh = total - slot.seen
    if fresh <= 0:
        return None
    tokens = tuple(int(t) for t in event["output_ids"][-fresh:])
    rows: Sequence[Sequence[Any]] = meta["output_token_logprobs"][-fresh:]
    versions = _versions(meta, slot.seen, total, otherwise=slot.version)
    slot.seen = total
    slot.tokens.extend(tokens)
    return Emission(
        request_id=slot.request_id,
        tokens=tokens,
        logprobs=tuple(float(row[0]) for row in rows),
        versions=versions,
    )


def prompt_logprobs(answer: Mapping[str, Any]) -> list[float]:
    """Of all tokens but the first."""
    rows: Sequence[Sequence[Any]] = answer["meta_info"]["input_token_logprobs"]
    return [float(row[0]) for row in rows[1:]]


def _versions(
    meta: Mapping[str, Any], start: int, end: int, *, otherwise: int
) -> tuple[VersionRun, ...]:
    """Runs of output tokens `[start, end)`; a server that knows no spans had one version."""
    spans: Sequence[Mapping[str, Any]] = meta.get("weight_versions") or ()
    runs: list[VersionRun] = []
    at = start
    for span in spans:
        upto = min(int(span["end"]), end)
        if upto > at:
            runs.append(VersionRun(_number(span["version"], otherwise), upto - at))
            at = upto
    if at < end:
        runs.append(VersionRun(otherwise, end - at))
    return tuple(runs)


def _number(label: object, otherwise: int) -> int:
    text = str(label)
    return int(text) if text.isdecimal() else otherwise


def _knobs(s: Sampling, room: int, *, deterministic: bool) -> dict[str, Any]:
    knobs: dict[str, Any] = {
        "max_new_tokens": room,
        "temperature": s.temperature,
        "top_p": s.top_p,
        "top_k": s.top_k or -1,
        "min_p": s.min_p,
    }
    if s.stop_tokens:
        knobs["stop_token_ids"] = list(s.stop_tokens)
    else:
        knobs["ignore_eos"] = True
    if s.stop_strings:
        knobs["stop"] = list(s.stop_strings)
        knobs["no_stop_trim"] = True
    if deterministic:
        # SGLang takes 32 bits.
        knobs["sampling_seed"] = s.seed & 0x7FFFFFFF
    return knobs
