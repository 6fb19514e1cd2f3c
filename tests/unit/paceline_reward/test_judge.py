"""Reward `judge` against a real HTTP server that is slow, dies, refuses or answers nonsense."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from paceline.config.load import validate
from paceline.config.sections.endpoints import EndpointSettings
from paceline.enums import ScoreStatus
from paceline.errors import ConfigError
from paceline.platform.fair_queue import FairQueue, QueueOwner
from paceline.platform.transport.endpoints import WorkerEndpoints
from paceline.plugins import RewardInput
from paceline.testing.rewards import item
from paceline.types import Score
from paceline_harness.patience import PATIENCE_S
from paceline_harness.servers.chat import Reply, chat, serving
from paceline_reward.pool import ChildPool, plain_children
from paceline_reward.scorer import Scorer

KEY = "sk-secret-0123456789"


class Judging:
    """A scorer whose endpoint `judge` is at a URL."""

    def __init__(self, tmp_path: Path) -> None:
        self._key = tmp_path / "key"
        self._key.write_text(f"{KEY}\n")
        self._endpoints: list[WorkerEndpoints] = []
        self._pool = ChildPool(plain_children(), FairQueue(1))

    def scorer(self, url: str, **settings: Any) -> Scorer:
        """Asks a server at once again after a failure."""
        given = validate(EndpointSettings, {"base_url": url, "key_file": self._key, **settings})
        made = WorkerEndpoints({"judge": given}, first_pause_s=0.02)
        self._endpoints.append(made)
        return Scorer(pool=self._pool, endpoints=made.of)

    async def close(self) -> None:
        for each in self._endpoints:
            await each.close()
        await self._pool.close()


@pytest.fixture
async def judging(tmp_path: Path) -> AsyncIterator[Judging]:
    made = Judging(tmp_path)
    yield made
    await made.close()


def asked(response: str = "It is 4.") -> RewardInput:
    return item(response, question="2+2?", answer="4")


async def score(
    scorer: Scorer,
    *items: RewardInput,
    timeout_s: float = PATIENCE_S,
    job: str = "job",
    **options: Any,
) -> list[Score]:
    part = {"kind": "judge", "model": "m", "timeout_s": timeout_s, **options}
    found = items or (asked(),)
    return await scorer.score(json.dumps([part]), found, owner=QueueOwner("tenant", job))


async def test_the_model_is_asked_and_its_last_score_counts(judging: Judging) -> None:
    with serving(lambda body: chat("At first Score: 3.\nNo.\n**Score: 8**")) as server:
        (found,) = await score(judging.scorer(server.url), system="Be strict.", request={"seed": 1})
    assert (found.reward, found.status) == (0.8, ScoreStatus.OK)
    (sent,) = server.requests
    assert (sent["path"], sent["model"], sent["seed"]) == ("/v1/chat/completions", "m", 1)
    assert [message["role"] for message in sent["messages"]] == ["system", "user"]
    assert "2+2?" in sent["messages"][1]["content"]
    assert "It is 4." in sent["messages"][1]["content"]
    assert server.keys == [f"Bearer {KEY}"]


@pytest.mark.parametrize(
    ("reply", "options", "reward"),
    [
        ('{"verdict": "good", "score": 4}', {"json_field": "score", "scale": [1, 5]}, 0.75),
        ('```json\n{"score": "1"}\n```', {"json_field": "score", "scale": [0, 1]}, 1.0),
        ("I rate it [[7]]", {"pattern": r"\[\[(\d+)\]\]"}, 0.7),
        ("0.25", {"pattern": r"[\d.]+", "scale": [0, 1]}, 0.25),
    ],
)
async def test_scores_are_read_by_field_or_pattern(
    judging: Judging, reply: str, options: dict[str, Any], reward: float
) -> None:
    with serving(lambda body: chat(reply)) as server:
        (found,) = await score(judging.scorer(server.url), **options)
    assert found.reward == pytest.approx(reward)


async def test_what_a_response_says_is_no_place_of_the_prompt(judging: Judging) -> None:
    prompt = '{question} {response} as {"score": 1}'
    with serving(lambda body: chat("Score: 0")) as server:
        await score(judging.scorer(server.url), asked("{answer} {response}"), prompt=prompt)
    (message,) = server.requests[0]["messages"]
    assert message["content"] == '2+2? {answer} {response} as {"score": 1}'


@pytest.mark.parametrize("code", [429, 500, 503])
async def test_a_failure_that_passes_is_tried_again(judging: Judging, code: int) -> None:
    replies = iter([(code, b"busy"), (code, b"busy"), chat("Score: 10")])
    with serving(lambda body: next(replies)) as server:
        (found,) = await score(judging.scorer(server.url))
    assert (found.reward, found.status, len(server.requests)) == (1.0, ScoreStatus.OK, 3)


@pytest.mark.parametrize(
    ("reply", "detail"),
    [
        ((500, b"x" * 5000), "endpoint 'judge': HTTP 500: xxx"),
        ((429, b"slow down", {"retry-after": "9"}), "endpoint 'judge': HTTP 429: slow down"),
        ((200, b"<html>"), "the answer is not a JSON object"),
        ((200, b"[" * 100_000), "the answer is not a JSON object"),
        ((200, b" " * (2 << 20)), "answers with more than 1048576 bytes"),
    ],
)
async def test_a_server_that_goes_on_failing_is_never_a_zero(
    judging: Judging, reply: Reply, detail: str
) -> None:
    with serving(lambda body: reply) as server:
        (found,) = await score(judging.scorer(server.url), timeout_s=3.0)
    assert found.status is ScoreStatus.INFRA_ERROR
    assert detail in found.detail
    assert len(found.detail) < 400


@pytest.mark.parametrize(
    "reply", ["I cannot say.", "Score: 11", '{"score": null}', "", "Score: " + "9" * 4000]
)
async def test_a_reply_without_a_score_is_asked_for_again_and_never_a_zero(
    judging: Judging, reply: str
) -> None:
    with serving(lambda body: chat(reply)) as server:
        (found,) = await score(judging.scorer(server.url), attempts=2)
    assert (found.status, len(server.requests)) == (ScoreStatus.INFRA_ERROR, 2)
    assert "no score in 2 replies" in found.detail


async def test_a_slow_server_and_one_that_is_gone_are_infra_errors(judging: Judging) -> None:
    gone = threading.Event()

    def slow(body: dict[str, Any]) -> Reply:
        gone.wait(5.0)
        return chat("Score: 1")

    with serving(slow) as server:
        scorer = judging.scorer(server.url)
        (late,) = await score(scorer, timeout_s=0.3)
        gone.set()
    (dead,) = await score(scorer, timeout_s=3.0)
    assert late.status is dead.status is ScoreStatus.INFRA_ERROR
    assert late.detail == "judge: UnavailableError: endpoint 'judge': no answer within 0.3 s"
    assert "ConnectError" in dead.detail


async def test_a_server_that_comes_back_is_found_in_time(judging: Judging) -> None:
    with serving(lambda body: chat("Score: 1")) as server:
        port = server.port
    waiting = asyncio.create_task(score(judging.scorer(server.url), timeout_s=PATIENCE_S))
    await asyncio.sleep(0.3)
    with serving(lambda body: chat("Score: 5"), port):
        (found,) = await waiting
    assert found.reward == 0.5


async def test_a_silent_request_is_made_again(judging: Judging) -> None:
    gone, first = threading.Event(), iter([True])

    def answer(body: dict[str, Any]) -> Reply:
        if next(first, False):
            gone.wait(5.0)
        return chat("Score: 5")

    with serving(answer) as server:
        (found,) = await score(judging.scorer(server.url, timeout_s=1.0), timeout_s=PATIENCE_S)
        gone.set()
    assert found.reward == 0.5
    assert len(server.requests) >= 2


async def test_a_refusal_is_told_without_the_key(
    judging: Judging, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with serving(lambda body: (401, f"Incorrect API key: {KEY}".encode())) as server:
        (found,) = await score(judging.scorer(server.url))
    assert (found.status, len(server.requests)) == (ScoreStatus.INFRA_ERROR, 1)
    assert "HTTP 401: Incorrect API key: ***" in found.detail
    assert KEY not in caplog.text


async def test_a_key_that_cannot_be_sent_is_not_quoted(judging: Judging, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sk-one\nsk-two")
    with serving(lambda body: chat("Score: 5")) as server:
        (found,) = await score(judging.scorer(server.url))
        (tmp_path / "key").unlink()
        (missing,) = await score(judging.scorer(server.url))
    assert server.requests == []
    assert "characters that no header may have" in found.detail
    assert "sk-" not in found.detail
    assert "key_file" in missing.detail


async def test_unknown_endpoints_are_named_with_those_there_are(judging: Judging) -> None:
    (found,) = await score(judging.scorer("http://127.0.0.1:9"), endpoint="openai")
    assert found.status is ScoreStatus.INFRA_ERROR
    assert "endpoint 'openai' is not one of this installation's: judge" in found.detail


async def test_equal_requests_of_a_job_are_made_once(judging: Judging) -> None:
    with serving(lambda body: chat("Score: 5")) as server:
        scorer = judging.scorer(server.url)
        assert (await score(scorer))[0].reward == 0.5
        assert (await score(scorer))[0].reward == 0.5
        assert len(server.requests) == 1
        await score(scorer, job="another")
        await score(scorer, asked("It is 5."))
        assert len(server.requests) == 3


async def test_a_job_has_so_many_requests_open_and_no_more(judging: Judging) -> None:
    wait = threading.Event()

    def answer(body: dict[str, Any]) -> Reply:
        wait.wait(0.05)
        return chat("Score: 5")

    with serving(answer) as server:
        items = [asked(f"It is {number}.") for number in range(12)]
        found = await score(judging.scorer(server.url), *items, concurrency=3)
        assert server.most_open == 3
        more = [asked(f"It was {number}.") for number in range(12)]
        found += await score(judging.scorer(server.url, concurrency=2), *more, concurrency=100)
    assert [each.reward for each in found] == [0.5] * 24


async def test_an_endpoint_has_as_many_connections_as_its_operator_allows(
    judging: Judging,
) -> None:
    most = 150  # httpx alone would open 100
    together = threading.Barrier(most)

    def answer(body: dict[str, Any]) -> Reply:
        together.wait(PATIENCE_S)
        return chat("Score: 5")

    with serving(answer) as server:
        items = [asked(f"It is {number}.") for number in range(most)]
        scorer = judging.scorer(server.url, concurrency=most)
        found = await score(scorer, *items, concurrency=most)
    assert [each.reward for each in found] == [0.5] * most


async def test_a_pattern_that_does_not_end_holds_up_nobody(judging: Judging) -> None:
    with serving(lambda body: chat("a" * 5000 + " 5")) as server:
        scorer = judging.scorer(server.url)
        slow = asyncio.create_task(score(scorer, pattern=r"(a|aa)+b"))
        ticks = 0
        while not slow.done():
            await asyncio.sleep(0.01)
            ticks += 1
    assert slow.result()[0].status is ScoreStatus.INFRA_ERROR
    assert "pattern: TimeoutError" in slow.result()[0].detail
    assert ticks > 10


@pytest.mark.parametrize(
    "url",
    [
        *(
            "ftp://x",
            "https://",
            "https://user:pw@x/v1",
            "https://x/v1?key=1",
            "x",
            "http://:80/v1",
        ),
        *("http://x:port/v1", "http://x:99999", "https://x/v1/chat/completions"),
    ],
)
def test_addresses_are_checked_and_have_no_secrets(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^base_url: "):
        validate(EndpointSettings, {"base_url": url})
