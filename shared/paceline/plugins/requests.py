"""Validates engine requests, the same for all engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.enums import FinishReason
from paceline.plugins.engines import EngineOutput, EngineRequest
from paceline.types import SamplingParams

MAX_STOP_TOKENS = 64
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
LEAST_TEMPERATURE = 1e-3
MOST_TEMPERATURE = 100.0
INT64 = range(-(1 << 63), 1 << 63)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits and capabilities of an engine."""

    vocab_size: int
    max_context: int
    stop_strings: bool  # whether stop strings are supported, which requires decoding tokens


def request_problem(request: EngineRequest, limits: EngineLimits) -> str:
    """Why a request is invalid (field, value, what is allowed); empty if it is valid."""
    tokens = request.tokens
    if not tokens:
        return "tokens: is empty; at least 1 is needed"
    if len(tokens) >= limits.max_context:
        return f"tokens: {len(tokens)} of them; allowed: fewer than {limits.max_context}"
    if min(tokens) < 0 or max(tokens) >= limits.vocab_size:
        return _foreign("tokens", tokens, limits)
    if not 0 <= request.sampled < len(tokens):
        return f"sampled: {request.sampled}; allowed: 0 to {len(tokens) - 1}"
    if not -1 <= request.pinned_version < INT64.stop:
        return f"pinned_version: {request.pinned_version}; allowed: -1 or a version"
    return _sampling_problem(request.sampling, limits)


def _sampling_problem(s: SamplingParams, limits: EngineLimits) -> str:
    heat = f"0 or {LEAST_TEMPERATURE} to {MOST_TEMPERATURE:g}"
    warm = LEAST_TEMPERATURE <= s.temperature <= MOST_TEMPERATURE
    strings = s.stop_strings
    # The comparisons are false for NaN.
    checks: tuple[tuple[bool, str, object, str], ...] = (
        (s.max_tokens >= 1, "max_tokens", s.max_tokens, "at least 1"),
        (s.temperature == 0 or warm, "temperature", s.temperature, heat),
        (0 < s.top_p <= 1, "top_p", s.top_p, "above 0, at most 1"),
        (s.top_k >= 0, "top_k", s.top_k, "0 (off) or more"),
        (0 <= s.min_p <= 1, "min_p", s.min_p, "0 to 1"),
        (s.seed in INT64, "seed", s.seed, "64-bit integers"),
        (len(s.stop_tokens) <= MAX_STOP_TOKENS, "stop_tokens", "too many", f"{MAX_STOP_TOKENS}"),
        (len(strings) <= MAX_STOP_STRINGS, "stop_strings", "too many", f"{MAX_STOP_STRINGS}"),
        (all(strings), "stop_strings", "''", "texts that are not empty"),
        (all(len(x) <= MAX_STOP_CHARS for x in strings), "stop_strings", "too long", "256 chars"),
        (limits.stop_strings or not strings, "stop_strings", strings, "none without a tokenizer"),
    )
    for fine, name, value, allowed in checks:
        if not fine:
            return f"sampling.{name}: {value}; allowed: {allowed}"
    stops = s.stop_tokens
    if stops and (min(stops) < 0 or max(stops) >= limits.vocab_size):
        return _foreign("sampling.stop_tokens", stops, limits)
    return ""


def _foreign(name: str, tokens: Sequence[int], limits: EngineLimits) -> str:
    wrong = next(t for t in tokens if not 0 <= t < limits.vocab_size)
    return f"{name}: id {wrong} is not in the vocabulary; allowed: 0 to {limits.vocab_size - 1}"


def error_output(request_id: str, code: str, text: str) -> EngineOutput:
    """The final output of a request that failed."""
    return EngineOutput(
        request_id=request_id,
        tokens=(),
        logprobs=(),
        versions=(),
        finish_reason=FinishReason.ERROR,
        error_code=code,
        error=text,
    )
