"""Malformed requests to a rollout worker: all are answered, none harms the worker or its engine."""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.platform.transport.rpc import MAX_MESSAGE_BYTES
from paceline.v1 import rollout_pb2 as pb
from paceline.v1 import types_pb2
from paceline_rollout.servicer import MAX_REQUESTS
from paceline_rollout.streams import MAX_ID_CHARS, MAX_TIMEOUT_S

# Of the worker of these tests.
VOCAB, CONTEXT, ACTIVE = 32, 64, 3
INT32, INT64 = (-(1 << 31), (1 << 31) - 1), (-(1 << 63), (1 << 63) - 1)
NAN, INF = math.nan, math.inf
SAYS_WHAT = re.compile(r"[a-z_.]+: .+", re.DOTALL)  # field: value; what is allowed
CODES = {"INVALID_ARGUMENT", "FAILED_PRECONDITION", "DEADLINE_EXCEEDED"}


# requests ---------------------------------------------------------------------------------------


def request(
    name: str = "x", *, sampling: dict[str, Any] | None = None, **fields: Any
) -> pb.GenerateRequest:
    """A valid request except for the given fields."""
    knobs: dict[str, Any] = {"max_tokens": 4, "temperature": 1.0, "top_p": 1.0, **(sampling or {})}
    known: dict[str, Any] = {"tokens": (1, 2), "pinned_version": -1, "min_version": -1, **fields}
    return pb.GenerateRequest(request_id=name, sampling=types_pb2.SamplingParams(**knobs), **known)


def batch(*requests: pb.GenerateRequest, abort: Sequence[str] = ()) -> bytes:
    return pb.GenerateBatch(requests=requests, abort=abort).SerializeToString()


Bad = tuple[pb.GenerateRequest, str]  # and the field that its error names first
KNOBS: dict[str, list[Any]] = {
    "temperature": [NAN, INF, -INF, -1.0, -5e-324, 1e-4, 100.1, 1e308],
    "top_p": [NAN, INF, -INF, 0.0, -0.5, 1.0000001, 2.0, 1e308],
    "min_p": [NAN, INF, -INF, -0.1, 1.1, -1e308],
    "top_k": [-1, INT32[0]],
    "max_tokens": [0, -1, INT32[0]],
    "stop_tokens": [[-1], [1, VOCAB], [INT32[1]], [INT32[0]], [1] * 65, [1] * 10_000],
    "stop_strings": [[""], ["a", ""], ["a"] * 17, ["a"] * 5000, ["a" * 257], ["a" * (1 << 20)]],
}
FIELDS: dict[str, list[Any]] = {
    "tokens": [
        *[[], [-1], [1, VOCAB], [INT32[1]], [1, INT32[0]]],
        *[[1] * CONTEXT, [1] * (CONTEXT + 1), [1] * 1_000_000],
    ],
    "pinned_version": [-2, INT64[0], 0, 1, ACTIVE - 1],
    "min_version": [-2, INT64[0], ACTIVE + 1, INT64[1]],
    "timeout_s": [NAN, INF, -INF, -1.0, -5e-324, MAX_TIMEOUT_S + 0.1, 1e308],
}
BAD: list[Bad] = [
    *((request(sampling={k: v}), f"sampling.{k}") for k, values in KNOBS.items() for v in values),
    *((request(**{k: v}), k) for k, values in FIELDS.items() for v in values),
    (request(pinned_version=ACTIVE + 1, min_version=ACTIVE + 2), "pinned_version"),
    (request(pinned_version=ACTIVE, min_version=INT64[1]), "pinned_version"),
    (request(""), "request_id"),
    (request("n" * (MAX_ID_CHARS + 1)), "request_id"),
    (request("n" * (1 << 20)), "request_id"),
    (pb.GenerateRequest(request_id="x"), "tokens"),
    (pb.GenerateRequest(request_id="x", tokens=[1], pinned_version=-1), "sampling.max_tokens"),
]
ODD: list[pb.GenerateRequest] = [  # allowed all the same
    *(request(sampling={"seed": seed}) for seed in INT64),
    request(sampling={"top_k": INT32[1]}),
    request(sampling={"top_p": 5e-324}),
    request(sampling={"max_tokens": INT32[1]}),
    request(sampling={"temperature": 0.001, "min_p": 1.0}),
    request(sampling={"temperature": 100.0}),
    request(sampling={"stop_strings": ["\0", "\ud7ff", "\uffff", "\N{GRINNING FACE}"]}),
    request(sampling={"stop_tokens": [0] * 64, "seed": 1}),
    request("\0\n\u202e\N{GRINNING FACE}"),
    request(timeout_s=MAX_TIMEOUT_S),
    request(min_version=0),
    request(pinned_version=ACTIVE, min_version=ACTIVE),
]


def wrong_wire() -> list[bytes]:
    """Fields with wrong types, wrong lengths and invalid text."""
    inside = [
        b"\x08\x01",  # request_id as a number
        b"\x09" + b"\xff" * 8,  # request_id as 64 bits
        b"\x0a\x02\xff\xfe",  # request_id that is not UTF-8
        b"\x0a\x03\xed\xa0\x80",  # request_id with half of a surrogate pair
        b"\x0a\x01x\x15" + b"\xff" * 4,  # tokens as 32 bits
        b"\x0a\x01x\x12\x02\x80\x80",  # a packed number that does not end
        b"\x0a\x01x\x12\x0b" + b"\xff" * 11,  # a packed number of more than 64 bits
        b"\x0a\x01x\x18\x05",  # sampling as a number
        b"\x0a\x01x\x1a\x04\x11\x00\x00\x00",  # a temperature of three bytes
        b"\x0a\x01x\x1a\x04\x3a\x02\xc3\x28",  # a stop string that is not UTF-8
        b"\x0a\x01x\x22\x01\x00",  # pinned_version as bytes
        b"\x0a\x01x\x31\x00\x00",  # a timeout that is cut off
        b"\x0a\x7fx",  # longer than what holds it
        b"\x0b" * 200,  # groups in groups that do not end
        b"\x07\x00",  # a wire type that there is not
        b"\xff\xff\xff\xff\x7f\x01",  # a field number that there is not
    ]
    outside = [b"\x0a\xff\xff\xff\xff\x0f", b"\x0a" * 50, b"\x00", b"\x12\x01\xff", b"\x80" * 20]
    return [*(b"\x0a" + bytes([len(body)]) + body for body in inside), *outside]


def mutated(chance: random.Random, count: int) -> list[bytes]:
    """Valid messages with some bytes changed, inserted or cut off."""
    whole = batch(
        request("a", sampling={"stop_tokens": [3], "stop_strings": ["zz"], "seed": -1}),
        request("b", tokens=list(range(VOCAB)), timeout_s=9.5, sampling={"top_k": 7, "min_p": 0.5}),
        abort=["a", "c"],
    )
    found: list[bytes] = []
    for number in range(count):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(data))
            change = chance.randrange(2 if number % 2 else 4)  # half of them keep their length
            if change == 0:
                data[at] = chance.randrange(256)
            elif change == 1:
                data[at] ^= 1 << chance.randrange(8)
            elif change == 2:
                data[at:at] = chance.randbytes(chance.randint(1, 5))
            else:
                del data[at : at + chance.randint(1, 5)]
        found.append(bytes(data))
    return found


def noise(chance: random.Random, count: int) -> list[bytes]:
    """Random bytes; half of them start like a request."""
    heads = (b"", b"\x0a")
    return [heads[n % 2] + chance.randbytes(chance.randint(1, 200)) for n in range(count)]


def truncated() -> list[bytes]:
    whole = batch(request("a", sampling={"stop_strings": ["zz"], "seed": 9}, timeout_s=1.0))
    return [whole[:length] for length in range(1, len(whole))]


CORPORA: dict[str, list[bytes]] = {
    "wrong_wire": wrong_wire(),
    "truncated": truncated(),
    "mutated": mutated(random.Random(1), 200),
    "noise": noise(random.Random(2), 100),
}


def test_there_are_enough_malformed_requests() -> None:
    fuzzed = {data for corpus in CORPORA.values() for data in corpus}
    assert len({bad.SerializeToString() for bad, _ in BAD}) >= 60
    assert len(fuzzed) >= 250
    readable = sum(parses(data) is not None for data in fuzzed)
    assert 50 <= readable <= len(fuzzed) - 100


def parses(data: bytes) -> pb.GenerateBatch | None:
    try:
        return pb.GenerateBatch.FromString(data)
    except DecodeError:
        return None


def check_fuzzed(worker: Any, data: bytes) -> None:
    """A message that cannot be parsed fails its stream; otherwise each request ends."""
    message = parses(data)
    if message is None:
        outcome = worker.send(data)
        assert outcome.code == "INVALID_ARGUMENT", (data, outcome)
        assert outcome.text.startswith("message: "), (data, outcome)
        return
    waits = any(one.pinned_version > ACTIVE for one in message.requests)
    names = [one.request_id for one in message.requests]
    outcome = worker.send(data, *([batch(abort=names)] if waits else []))
    assert outcome.code == "OK", (message, outcome)
    assert Counter(names) == Counter(end.request_id for end in outcome.ends), (message, outcome)
    for end in outcome.ends:
        if end.finish_reason == pb.FINISH_REASON_ERROR:
            assert end.error_code in CODES, end
            assert SAYS_WHAT.fullmatch(end.error), end


# tests ------------------------------------------------------------------------------------------


def test_bad_requests_are_refused_by_name(worker: Any) -> None:
    for bad, name in BAD:
        outcome = worker.send(batch(bad, worker.good))
        assert outcome.code == "OK", outcome.text
        ends = {end.request_id: end for end in outcome.ends}
        end = ends.pop(bad.request_id)
        assert (end.finish_reason, end.error_code in CODES) == (pb.FINISH_REASON_ERROR, True), (
            name,
            end,
        )
        assert end.error.startswith(f"{name}: "), (name, end.error)
        assert len(end.error) < 1000
        assert ends["good"].finish_reason == pb.FINISH_REASON_LENGTH
        assert outcome.tokens("good") == worker.right
    worker.is_well()


def test_bad_requests_all_at_once(worker: Any) -> None:
    named = [pb.GenerateRequest.FromString(bad.SerializeToString()) for bad, _ in BAD]
    for number, bad in enumerate(named):
        if bad.request_id == "x":
            bad.request_id = f"x{number}"
    outcome = worker.send(batch(*named, worker.good))
    assert Counter(e.request_id for e in outcome.ends) == Counter(
        [*(bad.request_id for bad in named), "good"]
    )
    assert outcome.tokens("good") == worker.right
    worker.is_well()


def test_odd_requests_are_served(worker: Any) -> None:
    for odd in ODD:
        outcome = worker.send(batch(odd))
        (end,) = outcome.ends
        assert end.finish_reason in {pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_STOP}, (odd, end)
        assert end.request_id == odd.request_id
        assert all(0 <= token < VOCAB for token in outcome.tokens(odd.request_id))
        assert all(math.isfinite(x) for event in outcome.events for x in event.logprobs)
    worker.is_well()


@pytest.mark.parametrize("corpus", CORPORA)
def test_fuzzed_messages(worker: Any, corpus: str) -> None:
    for data in CORPORA[corpus]:
        check_fuzzed(worker, data)
    worker.is_well()


NUMBERS = st.sampled_from([0.0, 1.0, 0.5, -1.0, NAN, INF, -INF, 1e308, 5e-324]) | st.floats()
SMALL = st.integers(-2, VOCAB + 1)
WIDE = st.sampled_from([-1, 0, 1, *INT32]) | SMALL
HUGE = st.sampled_from([-1, 0, ACTIVE, ACTIVE + 1, *INT64])
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
SAMPLINGS = st.builds(
    types_pb2.SamplingParams,
    max_tokens=WIDE,
    temperature=NUMBERS,
    top_p=NUMBERS,
    top_k=WIDE,
    min_p=NUMBERS,
    stop_tokens=st.lists(WIDE, max_size=3),
    stop_strings=st.lists(TEXTS, max_size=3),
    seed=HUGE,
)
REQUESTS = st.builds(
    pb.GenerateRequest,
    request_id=st.sampled_from(["", "a", "b"]) | TEXTS,
    tokens=st.lists(SMALL | WIDE, max_size=5) | st.just([1]),
    sampling=SAMPLINGS | st.just(request().sampling),
    pinned_version=HUGE,
    min_version=HUGE,
    timeout_s=NUMBERS,
)
BATCHES = st.builds(
    pb.GenerateBatch,
    requests=st.lists(REQUESTS, max_size=6),
    abort=st.lists(st.sampled_from(["", "a", "b", "unknown"]), max_size=3),
)


@settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(message=BATCHES)
def test_any_batch_is_answered(worker: Any, message: pb.GenerateBatch) -> None:
    check_fuzzed(worker, message.SerializeToString())


def test_the_worker_is_healthy_after_any_batch(worker: Any) -> None:
    worker.is_well()


def test_a_message_beyond_the_limit_fails_only_its_stream(worker: Any) -> None:
    huge = b"\x0a" + b"\xff\xff\xff\x7f" + bytes(MAX_MESSAGE_BYTES)
    outcome = worker.send(batch(request("before", sampling={"seed": 5})), huge)
    assert outcome.code == "RESOURCE_EXHAUSTED"
    assert str(MAX_MESSAGE_BYTES) in outcome.text
    worker.is_well()


def test_too_many_requests_in_a_message_fail_the_stream(worker: Any) -> None:
    outcome = worker.send(batch(*[pb.GenerateRequest()] * (MAX_REQUESTS + 1)))
    assert outcome.code == "INVALID_ARGUMENT"
    assert outcome.text == f"requests: {MAX_REQUESTS + 1} in a message; allowed: {MAX_REQUESTS}"
    worker.is_well()


def test_what_came_before_a_broken_message_is_answered(worker: Any) -> None:
    outcome = worker.send(batch(worker.good), b"\x0a\x7f")
    assert outcome.code == "INVALID_ARGUMENT"
    assert outcome.tokens("good") == worker.right
    worker.is_well()


def test_malformed_status_requests(worker: Any) -> None:
    for data in (b"", b"\x08\x01", b"\x0a\x03abc"):  # fields that it does not know
        assert worker.status(data) == "OK r0"
    for data in (b"\x0a\x7f", b"\xff" * 10, b"\x0b" * 200):
        assert worker.status(data).startswith("INVALID_ARGUMENT message: ")
    worker.is_well()


def test_deadlines_hold_after_thousands_of_others(worker: Any) -> None:
    brief = [request(str(n), timeout_s=300.0, sampling={"max_tokens": 1}) for n in range(1500)]
    waits = request("later", pinned_version=ACTIVE + 1, timeout_s=0.2)
    outcome = worker.send(batch(*brief), 1.0, batch(waits), batch(*brief))
    ends = {end.request_id: end for end in outcome.ends}
    assert len(outcome.ends) == 3001
    assert ends["later"].error_code == "DEADLINE_EXCEEDED"
    worker.is_well()


def test_a_name_twice_on_a_stream(worker: Any) -> None:
    twice = request("a", sampling={"seed": 5})
    outcome = worker.send(batch(twice, twice), batch(twice))
    refused = [end.error for end in outcome.ends if end.error]
    # The first may have ended before the second message came.
    assert len(outcome.ends) == 3
    assert 1 <= len(refused) <= 2
    assert set(refused) == {"request_id: 'a' is already open on this stream"}
    worker.is_well()


def test_a_name_used_again_has_a_deadline_of_its_own(worker: Any) -> None:
    waits = batch(request("a", pinned_version=ACTIVE + 1, timeout_s=300.0))
    for timeout_s in (0.3, 3.0, 30.0):  # as soon as this machine can keep one
        brief = batch(request("a", timeout_s=timeout_s))
        outcome = worker.send(brief, "a", waits, timeout_s + 0.1, batch(abort=["a"]))
        if outcome.ends[0].finish_reason == pb.FINISH_REASON_LENGTH:
            break
    assert [end.finish_reason for end in outcome.ends] == [
        pb.FINISH_REASON_LENGTH,
        pb.FINISH_REASON_ABORT,
    ]
    worker.is_well()


def test_a_name_on_two_streams(worker: Any) -> None:
    async def both() -> list[Any]:
        message = batch(worker.good)
        return await asyncio.gather(*(worker.exchange(message) for _ in range(8)))

    for outcome in worker.run(both()):
        assert outcome.tokens("good") == worker.right
    worker.is_well()


def test_aborts_of_unknown_and_concurrent_requests(worker: Any) -> None:
    unknown = ["", "nobody", "x" * 100_000, *map(str, range(5000))]
    assert worker.send(batch(abort=unknown)).code == "OK"
    # An engine with a thread of its own may have begun before it hears of the abort.
    crowd = [str(n) for n in range(2000)]
    outcome = worker.send(
        batch(
            *(request(name, sampling={"max_tokens": 50}) for name in [*crowd, "a"]),
            request("later", pinned_version=ACTIVE + 1),
            abort=[*crowd, "a", "a", "later"],
        )
    )
    ends = {end.request_id: end.finish_reason for end in outcome.ends}
    assert len(ends) == len(outcome.ends) == len(crowd) + 2
    assert {ends["a"], ends["later"]} == {pb.FINISH_REASON_ABORT}
    worker.is_well()


def test_a_request_that_waits_for_a_version_ends_at_its_deadline(worker: Any) -> None:
    outcome = worker.send(batch(request("later", pinned_version=INT64[1], timeout_s=0.05)))
    (end,) = outcome.ends
    assert (end.error_code, end.error) == ("DEADLINE_EXCEEDED", "timeout_s: has passed")
    worker.is_well()


def test_a_caller_that_hangs_up_leaves_nothing_behind(worker: Any) -> None:
    waits = batch(*(request(str(n), pinned_version=ACTIVE + 1) for n in range(500)))
    outcome = worker.send(waits, timeout_s=0.3)
    assert outcome.code == "DEADLINE_EXCEEDED"
    worker.is_well()
