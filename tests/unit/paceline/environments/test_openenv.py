"""Sessions with an OpenEnv server, as it should behave and as it should not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

import pytest
from pydantic import ValidationError
from websockets.asyncio.server import ServerConnection, serve
from websockets.http11 import Request, Response

from paceline.environments.openenv.options import OpenEnvOptions, OpenEnvSettings
from paceline.environments.openenv.session import OpenEnvError
from paceline.environments.openenv.tasks import OpenEnvTasks
from paceline.environments.openenv.world import OpenEnvWorld
from paceline.errors import InvalidError, UnavailableError

Handler = Callable[[ServerConnection], Awaitable[None]]
FULL = {"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "1 of 1 sessions"}}


def observation(text: str, reward: Any = None, done: Any = False) -> dict[str, Any]:
    data = {"observation": {"text": text, "metadata": {}}, "reward": reward, "done": done}
    return {"type": "observation", "data": data}


@asynccontextmanager
async def server(handler: Handler, **more: Any) -> AsyncGenerator[str]:
    async with serve(handler, "127.0.0.1", 0, **more) as running:
        port = next(iter(running.sockets)).getsockname()[1]
        yield f"http://127.0.0.1:{port}"


def answers(*given: Any) -> Handler:
    """A server that sends these answers, whatever it is asked."""

    async def handle(connection: ServerConnection) -> None:
        for each in given:
            await connection.recv()
            await connection.send(each if isinstance(each, (str, bytes)) else json.dumps(each))
        await connection.wait_closed()

    return handle


def world(url: str, **options: Any) -> OpenEnvWorld:
    settings = {"allow": [url.removeprefix("http://")]}
    return OpenEnvWorld(settings=settings, base_url=url, **options)


TASK = OpenEnvTasks(0, base_url="http://localhost")[0]


async def test_an_episode_has_a_session_of_its_own() -> None:
    asked: list[dict[str, Any]] = []

    async def handle(connection: ServerConnection) -> None:
        async for text in connection:
            message = json.loads(text)
            asked.append(message)
            kind = message["type"]
            if kind == "close":
                return
            done = kind == "step"
            await connection.send(json.dumps(observation("hi", 1 if done else None, done)))

    async with server(handle) as url:
        played = world(url, fixed={"lang": "en"}, reset={"level": 2}, prompt="> {text}")
        assert (await played.reset(TASK, 7)).text == "> hi"
        result = await played.step("hello")
        await played.close()
    assert (result.reward, result.done, result.truncated) == (1.0, True, False)
    seed = json.loads(TASK.payload)["seed"]
    start = {"level": 2, "seed": seed, "episode_id": f"{TASK.task_id}-7"}
    assert asked == [
        {"type": "reset", "data": start},
        {"type": "step", "data": {"lang": "en", "message": "hello"}},
        {"type": "close"},
    ]


async def test_a_full_server_is_asked_again() -> None:
    visits = 0

    async def handle(connection: ServerConnection) -> None:
        nonlocal visits
        visits += 1
        if visits < 3:
            await connection.send(json.dumps(FULL))
            return
        await answers(observation("at last"))(connection)

    async with server(handle) as url:
        played = world(url)
        assert (await played.reset(TASK, 0)).text == "text: at last"
        await played.close()
    assert visits == 3


async def test_a_reply_that_does_not_fit_is_told_and_counts() -> None:
    refused = {
        "code": "VALIDATION_ERROR",
        "message": "Invalid message",
        "errors": [{"loc": ["message"], "msg": "Input should be 'up'"}],
    }
    sent = answers(observation("go"), {"type": "error", "data": refused}, observation("", 0.5))
    async with server(sent) as url:
        played = world(url, max_turns=2, invalid_reward=-1)
        await played.reset(TASK, 0)
        wrong, last = await played.step("sideways"), await played.step("up")
        await played.close()
    assert wrong.observation.text == "Not an action: message: Input should be 'up'"
    assert (wrong.reward, wrong.done, wrong.truncated) == (-1, False, False)
    assert (last.reward, last.truncated) == (0.5, True)


@pytest.mark.parametrize(
    ("action", "reply", "told"),
    [
        ("integer", "seven", "an integer is needed"),
        ("integer", "9" * 5000, "an integer is needed"),
        ("number", "inf", "a number is needed"),
        ("json", "[1]", "a JSON object is needed"),
        ("json", "{" * 100_000, "a JSON object is needed"),
        ("json", '{"move": NaN}', "a JSON object is needed"),
        ("json", '{"move": 1e999}', "a JSON object is needed"),
    ],
)
async def test_a_reply_of_the_wrong_type_is_not_sent(action: str, reply: str, told: str) -> None:
    async with server(answers(observation("go"))) as url:
        played = world(url, action=action, invalid="{problem} after {observation}")
        await played.reset(TASK, 0)
        text = (await played.step(reply)).observation.text
        assert told in text
        assert "go" in text
        await played.close()


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("{", "unreadable answer"),
        ("[]", "an answer without data"),
        ({"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "boom"}}, "boom"),
        (observation("", "much"), "the reward much is no finite number"),
        (observation("", float("nan")), "no finite number"),
        (observation("", 10**400), "no finite number"),
        ({"type": "observation", "data": {"observation": 5}}, "an observation is no object"),
        ("x" * (2 << 20), "over size limit|too big|exceed"),
    ],
)
async def test_what_the_server_does_wrong_is_no_reward(answer: Any, told: str) -> None:
    async with server(answers(observation("go"), answer)) as url:
        played = world(url)
        await played.reset(TASK, 0)
        with pytest.raises(OpenEnvError, match=told):
            await played.step("hello")
        await played.close()


async def test_a_server_that_says_nothing_can_be_given_up() -> None:
    async def silent(connection: ServerConnection) -> None:
        await connection.wait_closed()

    async with server(silent) as url:
        played = world(url)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await played.reset(TASK, 0)
        await played.close()


async def test_only_what_the_operator_allows_is_reached() -> None:
    reached = False

    async def handle(connection: ServerConnection) -> None:
        nonlocal reached
        reached = True

    async with server(handle) as inner:
        with pytest.raises(InvalidError, match=r"base_url: 127.0.0.1:\d+ is not allowed here"):
            OpenEnvWorld(settings={}, base_url=inner)

        def elsewhere(connection: ServerConnection, request: Request) -> Response:
            response = connection.respond(HTTPStatus.FOUND, "")
            response.headers["Location"] = f"{inner.replace('http', 'ws')}/ws"
            return response

        async with server(handle, process_request=elsewhere) as url:
            with pytest.raises(UnavailableError, match="302"):
                await world(url).reset(TASK, 0)
    assert not reached


@pytest.mark.parametrize(
    ("entry", "url", "allowed"),
    [
        ("envs.internal", "https://ENVS.internal/echo", True),
        ("envs.internal:443", "https://envs.internal", True),
        ("envs.internal:443", "http://envs.internal", False),
        ("envs.internal", "http://envs.internal.evil.com", False),
        ("[::1]:8000", "http://[::1]:8000", True),
    ],
)
def test_hosts_and_ports(entry: str, url: str, allowed: bool) -> None:
    settings = OpenEnvSettings(allow=(entry,)).model_dump()
    if allowed:
        OpenEnvWorld(settings=settings, base_url=url)
        return
    with pytest.raises(InvalidError, match="is not allowed here"):
        OpenEnvWorld(settings=settings, base_url=url)


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "http://", "http://a@b", "http://h?x", "http://h:99999", "ws:h"]
)
def test_urls_that_are_refused_at_submit(url: str) -> None:
    with pytest.raises(ValidationError, match="base_url"):
        OpenEnvOptions(base_url=url)
