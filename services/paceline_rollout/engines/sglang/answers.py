"""Converts requests to SGLang's, and its events to tokens, log-probs and versions."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.enums import FinishReason
from paceline.plugins import EngineLimits, EngineOutput, EngineRequest
from paceline.types import SamplingParams, VersionRun
from paceline_rollout.engines.base import Decode, emit, stop_in, stop_window


@dataclass(slots=True, eq=False)
class ServerRequest:
    """A request and its tokens so far, from one or more calls of the server."""

    request: EngineRequest
    max_tokens: int  # of all calls
    tokens: list[int] = field(default_factory=list[int])
    rid: str = ""  # of the current call
    seen: int = 0  # tokens of that call so far
    runs: list[VersionRun] = field(default_factory=list[VersionRun])  # of that call
    version: int = -1  # active at the start of the call
    task: asyncio.Task[None] | None = None
    aborted: bool = False
    interrupted: bool = False  # to be continued under the next version

    @property
    def request_id(self) -> str:
        """Id of the request."""
        return self.request.request_id

    @property
    def sampled_before(self) -> tuple[int, ...]:
        """Tokens of this turn that are part of the request's context."""
        context = self.request.tokens
        return context[len(context) - self.request.sampled :]

    @property
    def remaining(self) -> int:
        """Tokens that may still be sampled."""
        return self.max_tokens - len(self.tokens)


def make_request(request: EngineRequest, limits: EngineLimits) -> ServerRequest:
    """The state of a request before its first call."""
    remaining = limits.max_context - len(request.tokens)
    return ServerRequest(request, max_tokens=min(request.sampling.max_tokens, remaining))


def closing(name: str, reason: FinishReason, matched: str = "") -> EngineOutput:
    """The end of a request whose tokens have all been emitted."""
    return emit(name, (), (), version=-1, reason=reason, matched=matched)


def body_of(server_request: ServerRequest, *, deterministic: bool) -> dict[str, Any]:
    """Body of the call that generates the rest of a request."""
    return {
        "rid": server_request.rid,
        "input_ids": [*server_request.request.tokens, *server_request.tokens],
        "sampling_params": _sampling_params(
            server_request.request.sampling, server_request.remaining, deterministic=deterministic
        ),
        "return_logprob": True,
        "logprob_start_len": -1,
        # Only requests that started under the same version share prefixes.
        "extra_key": str(server_request.version),
    }


def score_body(rid: str, tokens: Sequence[int], version: int) -> dict[str, Any]:
    """Body of a call that returns the log-probs of a prompt and generates nothing."""
    return {
        "rid": rid,
        "input_ids": list(tokens),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "extra_key": f"score-{version}",
    }


def take(server_request: ServerRequest, event: Mapping[str, Any]) -> EngineOutput | None:
    """New tokens of an event, whether events are cumulative or incremental; None: no new ones."""
    meta: Mapping[str, Any] = event["meta_info"]
    total = int(meta["completion_tokens"])
    num_new = total - server_request.seen
    if num_new <= 0:
        return None
    tokens = tuple(int(t) for t in event["output_ids"][-num_new:])
    rows: Sequence[Sequence[Any]] = meta["output_token_logprobs"][-num_new:]
    versions = _versions(meta, server_request.seen, total, default=server_request.version)
    server_request.seen = total
    server_request.tokens.extend(tokens)
    server_request.runs.extend(versions)
    return EngineOutput(
        request_id=server_request.request_id,
        tokens=tokens,
        logprobs=tuple(float(row[0]) for row in rows),
        versions=versions,
    )


def stale_start(server_request: ServerRequest, event: Mapping[str, Any]) -> bool:
    """Whether an answer started under a later version than its call.

    Such a request was queued in the server during a swap, and may have used a prefix that the
    previous version computed.
    """
    meta: Mapping[str, Any] = event["meta_info"]
    if server_request.seen or not meta.get("completion_tokens"):
        return False
    return (
        _versions(meta, 0, 1, default=server_request.version)[0].version != server_request.version
    )


def cut_at_stop(
    server_request: ServerRequest, output: EngineOutput, decode: Decode
) -> tuple[EngineOutput, str]:
    """What is left of an emission when one of its tokens completes a stop string, and the string.

    Servers run without a tokenizer: detokenization delays tokens, so that a token could arrive
    after the swap that followed it.
    """
    strings = server_request.request.sampling.stop_strings
    keep = stop_window(strings)
    first = len(server_request.tokens) - len(output.tokens)
    before = server_request.sampled_before
    turn = [*before, *server_request.tokens]
    for end in range(first + 1, len(server_request.tokens) + 1):
        last = len(before) + end
        text = decode(turn[max(0, last - keep) : last])
        if match := stop_in(text, strings):
            count = end - first
            del server_request.tokens[end:]
            truncated = replace(
                output,
                tokens=output.tokens[:count],
                logprobs=output.logprobs[:count],
                versions=_first(output.versions, count),
            )
            return truncated, match
    return output, ""


def num_mislabelled(server_request: ServerRequest, event: Mapping[str, Any]) -> int:
    """Number of tokens whose version in the last event differs from the one emitted earlier."""
    meta: Mapping[str, Any] = event["meta_info"]
    if not meta.get("weight_versions"):
        return 0
    real = _flat(_versions(meta, 0, server_request.seen, default=server_request.version))
    return sum(a != b for a, b in zip(real, _flat(server_request.runs), strict=True))


def verdict(
    server_request: ServerRequest, end: Mapping[str, Any]
) -> tuple[FinishReason | None, str]:
    """Finish reason and matched stop of a request after a call; None: it needs another call."""
    kind, matched = end.get("type", ""), end.get("matched")
    if server_request.aborted:
        return FinishReason.ABORT, ""
    if kind == "stop" and (
        isinstance(matched, str) or matched in server_request.request.sampling.stop_tokens
    ):
        return FinishReason.STOP, str(matched)
    if kind == "length" or (kind and not server_request.remaining):
        return FinishReason.LENGTH, ""
    # The model's own end token, which the caller did not ask to stop at, or an interrupt.
    continues = kind in ("stop", "stale") or (kind == "abort" and server_request.interrupted)
    return (None if continues else FinishReason.ERROR), ""


def prompt_logprobs(answer: Mapping[str, Any]) -> list[float]:
    """Log-probs of all tokens but the first."""
    rows: Sequence[Sequence[Any]] = answer["meta_info"]["input_token_logprobs"]
    return [float(row[0]) for row in rows[1:]]


def _versions(
    meta: Mapping[str, Any], start: int, end: int, *, default: int
) -> tuple[VersionRun, ...]:
    """Runs of output tokens `[start, end)`.

    Only the last event of an answer has spans. Before it, a token's version is the one that is
    active when the server sends it, as no tokens are in flight during a swap.
    """
    last = _number(meta.get("weight_version"), default)
    spans: Sequence[Mapping[str, Any]] = meta.get("weight_versions") or ()
    runs: list[VersionRun] = []
    position = start
    for span in spans:
        span_end = min(int(span["end"]), end)
        if span_end > position:
            runs.append(VersionRun(_number(span["version"], default), span_end - position))
            position = span_end
    if position < end:
        runs.append(VersionRun(last, end - position))
    return tuple(runs)


def _first(runs: Sequence[VersionRun], count: int) -> tuple[VersionRun, ...]:
    """Runs of the first `count` tokens."""
    truncated: list[VersionRun] = []
    for run in runs:
        if (count := min(run.count, count - sum(r.count for r in truncated))) > 0:
            truncated.append(VersionRun(run.version, count))
    return tuple(truncated)


def _flat(runs: Sequence[VersionRun]) -> list[int]:
    return [run.version for run in runs for _ in range(run.count)]


def _number(label: object, default: int) -> int:
    text = str(label)
    return int(text) if text.isdecimal() else default


def _sampling_params(s: SamplingParams, max_tokens: int, *, deterministic: bool) -> dict[str, Any]:
    params: dict[str, Any] = {
        "max_new_tokens": max_tokens,
        "temperature": s.temperature,
        "top_p": s.top_p,
        "top_k": s.top_k or -1,
        "min_p": s.min_p,
    }
    if s.stop_tokens:
        params["stop_token_ids"] = list(s.stop_tokens)
    else:
        params["ignore_eos"] = True
    if deterministic:
        # SGLang takes 32 bits.
        params["sampling_seed"] = s.seed & 0x7FFFFFFF
    return params
