"""Episodes that an outside endpoint answers, with a real server that is strict."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from paceline.enums import Purpose
from paceline.types import EpisodeProgress, Reply, Task, Transcript
from paceline.v1.experience_pb2 import GiveBackReason
from paceline_harness.servers.chat import JudgeServer, serving
from paceline_harness.servers.chat import Reply as Answer
from paceline_harness.servers.completions import completion, refusal, strict

MODEL, KEY = "small-model", "sk-secret-of-the-operator"
Body = dict[str, Any]


def job(environment: str = "arithmetic", *, sampling: Body | None = None, **endpoint: Any) -> Body:
    return {
        "kind": "eval",
        "model": {"path": MODEL, "endpoint": {"name": "outside", **endpoint}},
        "tasks": {"environment": environment},
        "eval": {"tasks": 8, "samples": 4, "temperature": 0.5},
        "sampling": {
            "max_tokens": 8,
            "max_context": 64,
            "on_truncation": "score",
            **(sampling or {}),
        },
    }


def right(body: Body) -> Answer:
    assert body["messages"][-1]["content"] == "12+34="
    return completion("46")


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text(KEY)
    return path


@pytest.fixture
def run(staged: Any, until: Any, assign: Any, key_file: Path) -> Any:
    """Run groups of a job against a server; returns the stage once all episodes have ended."""

    async def make(
        server: JudgeServer, spec: Body, *, size: int = 2, ends: int | None = None, **changes: Any
    ) -> Any:
        settings = {"base_url": server.url, "key_file": str(key_file), "timeout_s": 5.0}
        stage = await staged(spec=spec, endpoints={"outside": settings})
        await stage.open()
        given = {"purpose": Purpose.EVAL, "pinned_version": 0, **changes}
        stage.experience.give([assign(size=size, **given)])
        ended = size if ends is None else ends
        seen = stage.experience
        await until(lambda: len(seen.trajectories) + len(seen.given_back) >= ended)
        return stage

    return make


async def test_answers_are_scored_and_kept_with_their_messages(run: Any) -> None:
    with serving(strict(right, model=MODEL)) as server:
        stage = await run(server, job(), size=4)
    found = stage.experience.trajectories.values()
    assert len(found) == 4
    for each in found:
        (transcript,) = each.transcripts
        assert each.score.reward == 1.0
        assert json.loads(transcript.messages) == [
            {"role": "user", "content": "12+34="},
            {"role": "assistant", "content": "46"},
        ]
        assert transcript.replies == (Reply("46", "served-2026", "stop", 5, 2, reward=1.0),)
        # Nothing is made up that only weights of this installation could prove.
        assert transcript.tokens == transcript.logprobs == transcript.versions == ()
        assert each.provenance.engine == "endpoint"
        assert each.provenance.rollout_workers == ()
    assert not stage.rollouts[0].requests
    assert {body["path"] for body in server.requests} == {"/v1/chat/completions"}
    assert set(server.keys) == {f"Bearer {KEY}"}
    assert len({body["seed"] for body in server.requests}) == 4
    [same] = {(b["temperature"], b["max_tokens"], "top_p" in b) for b in server.requests}
    assert same == (0.5, 8, False)


async def test_fields_of_requests_are_replaced_or_left_out(run: Any) -> None:
    request = {"seed": None, "max_tokens": None, "max_completion_tokens": 99}
    with serving(strict(right, model=MODEL)) as server:
        await run(server, job(request=request), size=1)
    [body] = server.requests
    assert (body["max_completion_tokens"], {"seed", "max_tokens"} & set(body)) == (99, set())


async def test_an_episode_of_several_turns_is_one_dialogue(run: Any) -> None:
    with serving(strict(lambda body: completion(f"a{len(body['messages'])}"), model=MODEL)) as s:
        stage = await run(s, job("talking"), size=1)
    [trajectory] = stage.experience.trajectories.values()
    said = [(m["role"], m["content"]) for m in json.loads(trajectory.transcripts[0].messages)]
    assert said == [
        *(("user", "q0"), ("assistant", "a1")),
        *(("user", "q1"), ("assistant", "a3")),
        *(("user", "q2"), ("assistant", "a5")),
    ]
    assert [reply.reward for reply in trajectory.transcripts[0].replies] == [1.0, 1.0, 1.0]
    assert trajectory.environment_reward == 3.0


def call(name: str, arguments: str, of: str = "x1") -> Body:
    return {"id": of, "type": "function", "function": {"name": name, "arguments": arguments}}


async def test_tools_are_called_in_the_form_of_the_api(run: Any) -> None:
    """Two calls in one turn, of which one has arguments that are no JSON."""

    def answer(body: Body) -> Answer:
        assert {t["function"]["name"] for t in body["tools"]} >= {"calculator"}
        results = [m for m in body["messages"] if m["role"] == "tool"]
        if not results:
            calls = [call("calculator", '{"expression": "6*7"}'), call("calculator", "{oh", "x2")]
            return completion("", calls=calls)
        assert [m["tool_call_id"] for m in results] == ["x1", "x2"]
        assert "42" in results[0]["content"]
        assert "JSON" in results[1]["content"]
        return completion("It is 42")

    task = Task("t", "tools", json.dumps({"question": "6*7?", "answer": "42"}))
    wide = {"max_context": 4096, "max_tokens": 64}
    with serving(strict(answer, model=MODEL)) as server:
        stage = await run(server, job("tools", sampling=wide), size=1, task=task)
    [trajectory] = stage.experience.trajectories.values()
    assert trajectory.environment_reward == 1.0
    assert trajectory.transcripts[0].replies[0].text.count("<tool_call>") == 2


async def test_what_may_pass_is_asked_again(run: Any) -> None:
    """Rate limits, outages and broken answers cost time, and each episode is there once."""
    wrong: list[Answer] = [
        refusal(429, "slow down", **{"retry-after": "0"}),
        (503, b"overloaded"),
        (200, b"{not json"),
        (200, b'{"choices": []}'),
        (200, b'{"choices": [{"message": {"content": 5}}]}'),
        (200, b"[" * 100_000),
    ]
    numbers, lock = count(), threading.Lock()

    def answer(body: Body) -> Answer:
        with lock:
            number = next(numbers)
        return wrong[number] if number < len(wrong) else right(body)

    with serving(strict(answer, model=MODEL)) as server:
        stage = await run(server, job(), size=3)
    found = stage.experience.trajectories
    assert [each.score.reward for each in found.values()] == [1.0] * 3
    assert not stage.experience.given_back
    assert len(server.requests) == len(wrong) + 3


async def test_an_endpoint_that_stays_away_ends_the_attempt_in_time(run: Any) -> None:
    with serving(lambda _: (503, b"overloaded " + KEY.encode())) as server:
        stage = await run(server, job(timeout_s=1.0), size=1)
    [key] = stage.experience.given_back
    assert "503" in key.detail
    assert KEY not in key.detail
    assert not stage.experience.trajectories


async def test_it_tells_what_it_waits_for_meanwhile(run: Any, until: Any) -> None:
    with serving(lambda _: refusal(429, "quota of the month", **{"retry-after": "20"})) as server:
        stage = await run(server, job(), size=1, ends=0)

        def told() -> bool:
            phases = stage.service.report().phases
            return any("quota of the month" in each.detail for each in phases)

        await until(told)
    assert not stage.experience.given_back


OF_MODEL = {"error": {"message": "The model does not exist", "param": "model", "code": 400}}


@pytest.mark.parametrize(
    ("answer", "says", "reason"),
    [
        (refusal(401, f"Incorrect API key provided: {KEY}"), "HTTP 401", "DENIED"),
        (refusal(403, f"{KEY} may not use it"), "*** may not use it", "DENIED"),
        (refusal(404, "The model does not exist"), "does not exist", "DENIED"),
        (refusal(400, "no such model", code="model_not_found"), "no such model", "DENIED"),
        ((400, json.dumps(OF_MODEL).encode()), "does not exist", "DENIED"),
        ((404, b"[not, an, object"), "[not, an, object", "DENIED"),
        ((400, b'{"error": ["model"]}'), '["model"]', "INVALID"),
        (refusal(400, "unknown field"), "unknown field", "INVALID"),
        (refusal(400, "too long", code="context_length_exceeded"), "too long", "INVALID"),
    ],
)
async def test_a_refusal_for_good_is_not_repeated(
    run: Any, answer: Answer, says: str, reason: str
) -> None:
    """One of the key or of the model would be that of every other task too."""
    with serving(lambda _: answer) as server:
        stage = await run(server, job(), size=1)
    [key] = stage.experience.given_back
    assert says in key.detail
    assert KEY not in key.detail
    assert key.reason == GiveBackReason.Value(f"GIVE_BACK_REASON_{reason}")
    assert len(server.requests) == 1


async def test_a_name_that_the_worker_does_not_know_is_told(
    staged: Any, assign: Any, until: Any
) -> None:
    stage = await staged(spec=job())
    await stage.open()
    stage.experience.give([assign(size=1, purpose=Purpose.EVAL)])
    await until(lambda: stage.experience.given_back)
    [key] = stage.experience.given_back
    assert "'outside' is not one of this installation's: none" in key.detail


@pytest.mark.parametrize(
    ("answer", "text", "reason", "cut"),
    [
        (completion("4", finish_reason="length"), "4", "length", True),
        (completion("", finish_reason="content_filter"), "", "content_filter", False),
        (refusal(400, "filtered", code="content_filter"), "", "content_filter", False),
        (
            completion("", message={"content": None, "refusal": "I cannot"}),
            *("I cannot", "stop", False),
        ),
        (completion("", message={"content": "\ud800 5"}), "? 5", "stop", False),
    ],
)
async def test_how_a_turn_has_ended_is_kept(
    run: Any, answer: Answer, text: str, reason: str, cut: bool
) -> None:
    with serving(lambda _: answer) as server:
        stage = await run(server, job(), size=1)
    [trajectory] = stage.experience.trajectories.values()
    [reply] = trajectory.transcripts[0].replies
    assert (reply.text, reply.finish_reason, trajectory.truncated) == (text, reason, cut)
    assert trajectory.response_text == text


async def test_a_dialogue_that_becomes_too_long_is_cut_off(run: Any) -> None:
    def answer(body: Body) -> Answer:
        if len(body["messages"]) > 1:
            return refusal(400, "maximum context length is 9 tokens", code=None)
        return completion("a")

    with serving(strict(answer, model=MODEL)) as server:
        stage = await run(server, job("talking"), size=1)
    [trajectory] = stage.experience.trajectories.values()
    assert trajectory.truncated
    assert [reply.text for reply in trajectory.transcripts[0].replies] == ["a"]
    assert trajectory.response_text == "a"


async def test_a_job_has_so_many_requests_open(run: Any) -> None:
    gate = threading.Barrier(2, timeout=20.0)

    def answer(body: Body) -> Answer:
        gate.wait()  # opens if two are there, and a third one would wait for a fourth
        return right(body)

    with serving(strict(answer, model=MODEL)) as server:
        await run(server, job(concurrency=2), size=8)
    assert server.most_open == 2


def dialogue(*texts: str) -> str:
    roles = ("user", "assistant")
    return json.dumps([{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)])


@pytest.mark.parametrize(
    ("said", "actions", "asked"),
    [
        (("q0", "a", "q1"), ("a",), 2),  # it was to be asked
        (("q0", "a"), ("a",), 2),  # the world has not answered
        (("q0", "a"), (), 2),  # the world was not told
        (("q0", "a", "q1", "b", "q2", "c"), ("a", "b", "c"), 0),  # it waits for its score
    ],
)
async def test_another_worker_goes_on_without_asking_twice(
    run: Any, said: tuple[str, ...], actions: tuple[str, ...], asked: int
) -> None:
    replies = tuple(Reply(text, "served-2026", "stop", 5, 1, 1.0) for text in said[1::2])
    transcript = Transcript((), (), (), (), messages=dialogue(*said), replies=replies)
    progress = EpisodeProgress("g0", 0, 1, (transcript,), actions)
    with serving(strict(lambda _: completion("z"), model=MODEL)) as server:
        stage = await run(server, job("talking"), size=1, attempts=(2,), progress=(progress,))
    [trajectory] = stage.experience.trajectories.values()
    assert len(server.requests) == asked
    messages = json.loads(trajectory.transcripts[0].messages)
    assert [m["content"] for m in messages if m["role"] == "user"] == ["q0", "q1", "q2"]
    assert len(trajectory.transcripts[0].replies) == 3
    assert trajectory.environment_reward == 3.0
    roles = Counter(m["role"] for m in messages)
    assert roles == {"user": 3, "assistant": 3}


def test_calls_without_their_answers_are_shown_as_text() -> None:
    """A server refuses them; a world may answer as it likes."""
    from paceline.plugins import Message, Observation
    from paceline_environment.outside.history import ChatHistory

    history = ChatHistory()
    history.observed(Observation(text="hi"))
    calls = [call("f", "{}", "x1"), call("g", '{"a": 1}', "x2")]
    history.replied({"role": "assistant", "content": "", "tool_calls": calls})
    history.observed(Observation(messages=(Message("tool", "one"), Message("user", "go on"))))
    body = {"model": MODEL, "messages": history.messages}
    checked: Callable[[Body], Answer] = strict(lambda _: completion("ok"), model=MODEL)
    assert checked(body)[0] == 200
    assert [m["role"] for m in history.messages] == ["user", "assistant", "user", "user"]
    assert '"name": "g", "arguments": {"a": 1}' in history.messages[1]["content"]
