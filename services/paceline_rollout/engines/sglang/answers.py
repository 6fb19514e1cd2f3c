"""From a request to SGLang's, and from SGLang's events to tokens, log-probs and versions."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.interfaces import Emission, Generation
from paceline.types import Sampling, VersionRun
from paceline_rollout.engines.base import Decode, Limits, emit, stop_in, stop_window


@dataclass(slots=True, eq=False)
class Slot:
    """A request and what has come out of it, over one or more calls of the server."""

    request: Generation
    room: int  # tokens it may have in all
    tokens: list[int] = field(default_factory=list[int])
    rid: str = ""  # of the call that is open
    seen: int = 0  # tokens of that call
    runs: list[VersionRun] = field(default_factory=list[VersionRun])  # of that call
    version: int = -1  # active when it began
    task: asyncio.Task[None] | None = None
    aborted: bool = False
    again: bool = False  # interrupted, to go on under the next version

    @property
    def request_id(self) -> str:
        """The caller's name for it."""
        return self.request.request_id

    @property
    def sampled_before(self) -> tuple[int, ...]:
        """Tokens of this turn that the request came with."""
        context = self.request.tokens
        return context[len(context) - self.request.sampled :]

    @property
    def left(self) -> int:
        """Tokens it may still have."""
        return self.room - len(self.tokens)


def slot_for(request: Generation, limits: Limits) -> Slot:
    """A request and the room it has."""
    left = limits.max_context - len(request.tokens)
    return Slot(request, room=min(request.sampling.max_tokens, left))


def closing(name: str, reason: str, matched: str = "") -> Emission:
    """The end of a request, all of whose tokens are out."""
    return emit(name, (), (), version=-1, reason=reason, matched=matched)


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
    slot.runs.extend(versions)
    return Emission(
        request_id=slot.request_id,
        tokens=tokens,
        logprobs=tuple(float(row[0]) for row in rows),
        versions=versions,
    )


def stale_start(slot: Slot, event: Mapping[str, Any]) -> bool:
    """Whether an answer began under a later version than its request did.

    Such a request waited in the server while weights were swapped, and may have found a prefix
    that the version before has computed.
    """
    meta: Mapping[str, Any] = event["meta_info"]
    if slot.seen or not meta.get("completion_tokens"):
        return False
    return _versions(meta, 0, 1, otherwise=slot.version)[0].version != slot.version


def cut_at_stop(slot: Slot, emission: Emission, decode: Decode) -> tuple[Emission, str]:
    """What is left of an emission when one of its tokens completes a stop string, and the string.

    Servers run without a tokenizer: what decodes tokens would also delay them, and then a token
    could be passed on after the swap that followed it.
    """
    strings = slot.request.sampling.stop_strings
    keep = stop_window(strings)
    first = len(slot.tokens) - len(emission.tokens)
    before = slot.sampled_before
    turn = [*before, *slot.tokens]
    for end in range(first + 1, len(slot.tokens) + 1):
        last = len(before) + end
        text = decode(turn[max(0, last - keep) : last])
        if hit := stop_in(text, strings):
            count = end - first
            del slot.tokens[end:]
            kept = replace(
                emission,
                tokens=emission.tokens[:count],
                logprobs=emission.logprobs[:count],
                versions=_first(emission.versions, count),
            )
            return kept, hit
    return emission, ""


def mislabelled(slot: Slot, event: Mapping[str, Any]) -> int:
    """Tokens whose version the last event knows better than those before it did."""
    meta: Mapping[str, Any] = event["meta_info"]
    if not meta.get("weight_versions"):
        return 0
    real = _flat(_versions(meta, 0, slot.seen, otherwise=slot.version))
    return sum(a != b for a, b in zip(real, _flat(slot.runs), strict=True))


def verdict(slot: Slot, end: Mapping[str, Any]) -> tuple[str, str]:
    """How a request goes on after a call: a finish reason, `again` or `error`; what it matched."""
    kind, matched = end.get("type", ""), end.get("matched")
    if slot.aborted:
        return "abort", ""
    if kind == "stop" and (
        isinstance(matched, str) or matched in slot.request.sampling.stop_tokens
    ):
        return "stop", str(matched)
    if kind == "length" or (kind and not slot.left):
        return "length", ""
    # The model's own end token, of which the caller said nothing, or an interrupt.
    goes_on = kind in ("stop", "stale") or (kind == "abort" and slot.again)
    return ("again" if goes_on else "error"), ""


def prompt_logprobs(answer: Mapping[str, Any]) -> list[float]:
    """Of all tokens but the first."""
    rows: Sequence[Sequence[Any]] = answer["meta_info"]["input_token_logprobs"]
    return [float(row[0]) for row in rows[1:]]


def _versions(
    meta: Mapping[str, Any], start: int, end: int, *, otherwise: int
) -> tuple[VersionRun, ...]:
    """Runs of output tokens `[start, end)`.

    Only the last event of an answer has spans; before, the version that is active when the
    server passes a token on is the one that made it, for nothing is on its way during a swap.
    """
    last = _number(meta.get("weight_version"), otherwise)
    spans: Sequence[Mapping[str, Any]] = meta.get("weight_versions") or ()
    runs: list[VersionRun] = []
    at = start
    for span in spans:
        upto = min(int(span["end"]), end)
        if upto > at:
            runs.append(VersionRun(_number(span["version"], otherwise), upto - at))
            at = upto
    if at < end:
        runs.append(VersionRun(last, end - at))
    return tuple(runs)


def _first(runs: Sequence[VersionRun], count: int) -> tuple[VersionRun, ...]:
    """Runs of the first `count` tokens."""
    kept: list[VersionRun] = []
    for run in runs:
        if (some := min(run.count, count - sum(r.count for r in kept))) > 0:
            kept.append(VersionRun(run.version, some))
    return tuple(kept)


def _flat(runs: Sequence[VersionRun]) -> list[int]:
    return [run.version for run in runs for _ in range(run.count)]


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
    if deterministic:
        # SGLang takes 32 bits.
        knobs["sampling_seed"] = s.seed & 0x7FFFFFFF
    return knobs
