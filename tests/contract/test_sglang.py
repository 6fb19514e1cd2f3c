"""Guarantees of the SGLang engine beyond the contract: exactness, loading methods, survival."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import torch

from paceline.errors import InvalidError, PacelineError
from paceline.front.local.ports import PORTS
from paceline.testing.engines import Answers, ask, wait_for
from paceline_harness.patience import PATIENCE_S
from paceline_harness.ports import free_port
from paceline_harness.sglang import GRPC_DISTANCE
from paceline_rollout.engines.sglang.make import sglang
from paceline_rollout.engines.sglang.options import SglangSettings
from paceline_rollout.engines.sglang.server import Launch, LaunchedServer, derived_ports

VOCAB, CONTEXT = 32, 256
FAKE = "paceline_harness.sglang"
REAL = pytest.param("real", marks=pytest.mark.sglang)
# A real server takes most of a minute to start; tests/faults/test_kill_sglang.py ends one in CI.
OWN_SERVERS = (pytest.mark.sglang, pytest.mark.extended)
Open = Callable[..., Any]


@dataclass(frozen=True)
class Kind:
    """Fake or real SGLang, and how to start a server."""

    real: bool
    options: dict[str, Any]


@pytest.fixture(params=["fake", REAL])
def options(request: Any) -> dict[str, Any]:
    """Of an engine with a fake server of its own, or with the real one that tests share."""
    if request.param == "fake":
        return {"python": sys.executable, "module": FAKE}
    return {"url": request.getfixturevalue("sglang_url"), "shared_memory": True}


@pytest.fixture(params=["fake", pytest.param("real", marks=OWN_SERVERS)])
def kind(request: Any) -> Kind:
    """How to start servers that a test may end."""
    if request.param == "fake":
        return Kind(real=False, options={"python": sys.executable, "module": FAKE})
    python = request.getfixturevalue("sglang_python")
    return Kind(real=True, options={"python": python, "device": "cpu", "cache_tokens": 8192})


@pytest.fixture
def opened(model: Any, model_dir: Path) -> Open:
    @asynccontextmanager
    async def make(**changes: Any) -> AsyncGenerator[Answers]:
        options: dict[str, Any] = {"tokenizer_dir": None, **changes}
        mine = SglangSettings.model_fields.keys() & options.keys()
        engine = sglang(
            settings={name: options.pop(name) for name in mine},
            model_dir=model_dir,
            dtype="float32",
            max_context=CONTEXT,
            max_concurrent=16,
            threads=1,
            job_id="job",
            **options,
        )
        await engine.start()
        answers = Answers(engine, model)
        try:
            yield answers
        finally:
            await engine.close()
            await answers.task

    return make


@pytest.fixture
async def attached(opened: Open, sglang_url: str) -> AsyncGenerator[Answers]:
    async with opened(url=sglang_url, shared_memory=True) as out:
        yield out


def exact(model: Any, context: list[int], *, temperature: float = 1.0) -> list[float]:
    """The trainer's log-probs of tokens[1:]."""
    with torch.no_grad():
        logits = model(torch.tensor([context])).logits[0, :-1] / temperature
    logp = torch.log_softmax(logits, -1)
    return logp.gather(1, torch.tensor(context[1:]).unsqueeze(1)).squeeze(1).tolist()


def servers() -> list[psutil.Process]:
    """Guards and servers started by this process, without PyTorch's own child process."""
    found: list[psutil.Process] = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.is_running() and process.name() != "torch_shm_manager":
                found.append(process)
    return found


async def tell(engine: Any, path: str, body: dict[str, Any]) -> None:
    """Ask something of a fake server."""
    async with aiohttp.ClientSession() as http, http.post(f"{engine.url}{path}", json=body):
        pass


# exactness ----------------------------------------------------------------------------------


@pytest.mark.sglang
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
async def test_logprobs_are_the_trainers(attached: Answers, model: Any, temperature: float):
    await attached.swap(0)
    asks = [
        ask(str(n), range(1, 4 + n), max_tokens=40, temperature=temperature, top_p=0.9)
        for n in range(12)
    ]
    await attached.run(*asks)
    for request in asks:
        context = [*request.tokens, *attached.tokens(request.request_id)]
        wanted = exact(model, context, temperature=temperature or 1.0)[len(request.tokens) - 1 :]
        assert attached.logprobs(request.request_id) == pytest.approx(wanted, abs=1e-4)


@pytest.mark.sglang
async def test_score_is_the_trainers(attached: Answers, model: Any):
    await attached.swap(0)
    tokens = list(range(1, 30))
    assert await attached.engine.score(tokens) == pytest.approx(exact(model, tokens), abs=1e-5)


@pytest.mark.sglang
async def test_the_proof_of_bytes_is_of_the_weights_that_it_has(
    attached: Answers, model: Any, other_model: Any
):
    engine: Any = attached.engine
    for version, loaded in enumerate((model, other_model, model)):
        await attached.swap(version, model=loaded)
        assert await engine.unequal(attached.weights(version, loaded)) == []
    missed = await engine.unequal(attached.weights(2, other_model))
    names = (
        "model.embed_tokens",
        "model.layers.0.self_attn.qkv_proj",
        "model.layers.0.mlp.down_proj",
    )
    assert {f"{name}.weight" for name in names} <= set(missed)
    assert await engine.unequal(attached.weights(2, model)) == []


@pytest.mark.sglang
@pytest.mark.parametrize("activation", ["in_flight", "interrupt"])
async def test_a_swap_leaves_no_stale_prefix(
    attached: Answers, model: Any, other_model: Any, activation: str
):
    prompt = [*range(1, 20)]
    await attached.swap(0)
    attached.engine.submit([ask("old", prompt, max_tokens=200)])
    await attached.until("old", 5)
    await attached.swap(1, activation, other_model)
    await attached.run(ask("new", prompt, max_tokens=20))
    await attached.end("old")
    later = exact(other_model, [*prompt, *attached.tokens("new")])[len(prompt) - 1 :]
    assert attached.logprobs("new") == pytest.approx(later, abs=1e-4)
    context = [*prompt, *attached.tokens("old")]
    swapped = attached.versions("old").index(1)
    before = exact(model, context)[len(prompt) - 1 :][:swapped]
    assert attached.logprobs("old")[:swapped] == pytest.approx(before, abs=1e-4)
    if activation == "interrupt":
        after = exact(other_model, context)[len(prompt) - 1 :][swapped:]
        assert attached.logprobs("old")[swapped:] == pytest.approx(after, abs=1e-4)


@pytest.mark.sglang
async def test_requests_that_wait_through_a_swap_use_no_older_prefix(
    attached: Answers, model: Any, other_model: Any
):
    """They were sent under the previous version, whose prefix is still cached."""
    prompt = [*range(1, 30)]
    models = [model, other_model]
    await attached.swap(0)
    await attached.run(ask("warm", prompt))
    for version in range(1, 4):
        names = [f"{version}-{n}" for n in range(16)]
        attached.engine.submit([ask(name, prompt, max_tokens=20) for name in names])
        await asyncio.sleep(0.01 * version)
        await attached.swap(version, "in_flight", models[version % 2])
        for name in names:
            await attached.end(name)
            versions = attached.versions(name)
            whole = versions.count(versions[0])
            context = [*prompt, *attached.tokens(name)]
            wanted = exact(models[versions[0] % 2], context)[len(prompt) - 1 :]
            assert attached.logprobs(name)[:whole] == pytest.approx(wanted[:whole], abs=1e-4)


# loading ------------------------------------------------------------------------------------


@pytest.mark.sglang
@pytest.mark.parametrize(
    "options",
    [
        {"load": "tensor", "shared_memory": False},
        {"load": "tensor", "shared_memory": True, "bucket_bytes": 5000},
        {"load": "disk", "folder": "/tmp"},
        {"load": "distributed", "backend": "gloo", "bucket_bytes": 5000},
    ],
    ids=["by value", "shared memory", "disk", "distributed"],
)
async def test_all_ways_of_loading(
    opened: Open, sglang_url: str, other_model: Any, options: dict[str, Any]
):
    async with opened(url=sglang_url, **options) as out:
        tokens = [*range(1, 20)]
        for version, model in enumerate([other_model, out.model]):
            await out.swap(version, model=model)
            assert await out.engine.score(tokens) == pytest.approx(exact(model, tokens), abs=1e-5)


@pytest.mark.parametrize("way", ["tensor", "disk"])
async def test_ways_of_loading_a_fake(opened: Open, way: str):
    async with opened(python=sys.executable, module=FAKE, load=way) as out:
        await out.swap(4)
        assert out.engine.status().version == 4


def parts(name: str, size: int) -> torch.nn.Module:
    """A model with one tensor, `model.NAME.weight`."""
    inner = torch.nn.ModuleDict({name: torch.nn.Embedding(size, size)})
    return torch.nn.ModuleDict({"model": inner})


MISFITS = [
    (parts("embedding", VOCAB), r"'model\.embedding\.weight' is unknown"),
    (parts("embed_tokens", 2), r"has shape \(2, 2\); allowed: \(32, 32\)"),
    (parts("embed_tokens", VOCAB), "'lm_head.weight' is missing"),
]


async def test_what_does_not_fit_never_reaches_the_server(opened: Open, options: dict[str, Any]):
    async with opened(**options) as out:
        await out.swap(0)
        for model, message in MISFITS:
            with pytest.raises(InvalidError, match=message):
                await out.swap(1, model=model)
        assert out.engine.status().version == 0
        await out.run(ask("a"))
        assert out.versions("a") == [0] * 8


# survival -----------------------------------------------------------------------------------


async def test_a_replica_dies(opened: Open, kind: Kind):
    before = set(servers())
    async with AsyncExitStack() as stack:
        one: Answers = await stack.enter_async_context(opened(**kind.options))
        first = set(servers()) - before
        two: Answers = await stack.enter_async_context(opened(**kind.options))
        await asyncio.gather(one.swap(3), two.swap(3))
        engines: list[Any] = [one.engine, two.engine]
        sums = [await engine.checksums() for engine in engines]
        assert sums[0] == sums[1] != []
        if not kind.real:
            await tell(one.engine, "/hold", {"tokens": 5})  # it is not over before it dies
        one.engine.submit([ask("a", max_tokens=200)])
        await one.until("a", 5)
        server = next(p for p in first if "-m" in p.cmdline() and "-I" not in p.cmdline())
        server.send_signal(signal.SIGKILL)
        end = await one.end("a")
        assert (end.finish_reason, end.error_code) == ("error", "UNAVAILABLE")
        await wait_for(lambda: one.engine.status().version == -1)
        refused = (await one.run(ask("b")))[0]
        assert (refused.error_code, refused.tokens) == ("UNAVAILABLE", ())
        had = one.tokens("a")
        await two.run(ask("a", [1, 2, 3, *had], max_tokens=200 - len(had)))
        assert len([*had, *two.tokens("a")]) == 200
        await wait_for(lambda: one.engine.status().version == 3, timeout_s=PATIENCE_S)
        assert await engines[0].checksums() == sums[0]
        await one.run(ask("c"))
        assert one.versions("c") == [3] * 8


async def test_a_silent_server_is_replaced(opened: Open):
    before = set(servers())
    # The answer takes seconds, so that it is not over before the processes are stopped.
    slow = ("--fake-token-s=0.05",)
    async with opened(python=sys.executable, module=FAKE, args=slow, stall_s=6.0) as out:
        await out.swap(2)
        out.engine.submit([ask("a", max_tokens=250)])
        await out.until("a", 3)
        for process in set(servers()) - before:
            process.suspend()
        assert (await out.end("a")).error_code == "UNAVAILABLE"
        # The answer breaks off a moment before the engine knows that its server has ended.
        await wait_for(lambda: out.engine.status().version == -1)
        await wait_for(lambda: out.engine.status().version == 2, timeout_s=PATIENCE_S)
        await out.run(ask("b"))
        assert out.versions("b") == [2] * 8


async def test_a_failed_load_serves_nothing_until_the_next(opened: Open):
    async with opened(python=sys.executable, module=FAKE, load="tensor") as out:
        await out.swap(0)
        # Over disk it is tried once more, so two have to fail.
        await tell(out.engine, "/fail_updates", {"times": 2})
        await tell(out.engine, "/hold", {"tokens": 3})
        out.engine.submit([ask("a", max_tokens=200)])
        await out.until("a", 3)
        with pytest.raises(PacelineError, match="discard the whole weights"):
            await out.swap(1)
        assert (await out.end("a")).error_code == "UNAVAILABLE"
        assert out.engine.status().version == -1
        await tell(out.engine, "/hold", {"tokens": None})
        await out.swap(1)
        await out.run(ask("b"))
        assert out.versions("b") == [1] * 8


async def test_the_models_own_end_token_is_not_an_end(opened: Open):
    async with opened(python=sys.executable, module=FAKE) as out:
        await out.swap(0)
        await out.run(ask("all", max_tokens=60))
        tokens = out.tokens("all")
        await out.run(ask("some", max_tokens=60, stop_tokens=(tokens[9],)))
        assert out.tokens("some") == tokens[: tokens.index(tokens[9]) + 1]
        assert out.parts["some"][-1].matched_stop == str(tokens[9])


async def test_a_stop_string_ends_with_its_last_token(
    opened: Open, options: dict[str, Any], model_dir: Path
):
    async with opened(**options, tokenizer_dir=model_dir) as out:
        await out.swap(0)
        await out.run(ask("all", max_tokens=60, temperature=0.0))
        tokens = out.tokens("all")
        text = f"<{tokens[4]}> <{tokens[5]}>"
        await out.run(ask("some", max_tokens=60, temperature=0.0, stop_strings=(text,)))
        some = out.tokens("some")
        assert some == tokens[: len(some)]
        assert some[-2:] == tokens[4:6]
        assert len(some) == len(out.logprobs("some")) == len(out.versions("some"))
        assert out.parts["some"][-1].matched_stop == text
        # The first half of it was sampled elsewhere.
        rest = ask(
            "rest",
            [1, 2, 3, *tokens[:5]],
            sampled=5,
            max_tokens=55,
            temperature=0.0,
            stop_strings=(text,),
        )
        await out.run(rest)
        assert out.tokens("rest") == [tokens[5]]
        assert out.parts["rest"][-1].matched_stop == text


async def test_a_key_is_used(opened: Open):
    async with opened(python=sys.executable, module=FAKE, api_key="secret") as out:
        await out.swap(0)
        await out.run(ask("a"))
        assert len(out.tokens("a")) == 8
        for process in servers():
            with suppress(psutil.Error):
                words = " ".join([*process.cmdline(), *process.environ().values()])
                assert "secret" not in words


async def test_a_port_that_another_has_taken_is_left_to_it(launch_of: Callable[..., Launch]):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        taken: int = other.getsockname()[1]
        launch = launch_of(sys.executable, "ports.log", module=FAKE, device="", max_tokens=0)
        ports = iter([taken])
        server = LaunchedServer(
            launch, api_key="", timeout_s=120, choose_port=lambda: next(ports, 0) or free_port()
        )
        await server.start()
        assert not server.url.endswith(f":{taken}")
        await server.stop()


async def test_derived_ports_are_chosen_together_with_the_port(launch_of: Callable[..., Launch]):
    """The gRPC port of the first choice is taken, that of a second one would be above 65,535."""
    grpc = ("--fake-grpc",)
    launch = launch_of(sys.executable, "grpc.log", module=FAKE, device="", max_tokens=0, args=grpc)
    first = free_port()
    ports = iter([first, 60_467])
    with socket.socket() as other:
        other.bind(("127.0.0.1", first + GRPC_DISTANCE))
        server = LaunchedServer(
            launch, api_key="", timeout_s=120, choose_port=lambda: next(ports, 0) or free_port()
        )
        await server.start()
        await server.stop()
    server = LaunchedServer(launch, api_key="", timeout_s=120)
    await server.start()
    port = int(server.url.rpartition(":")[2])
    await server.stop()
    # All below what the system hands out to others between the choice and the start.
    assert {port, *(port + distance for distance in derived_ports(launch.dp))} <= set(PORTS)


async def test_close_leaves_no_process(opened: Open):
    before = set(servers())
    async with opened(python=sys.executable, module=FAKE):
        mine = set(servers()) - before
        assert len(mine) >= 2
    await wait_for(lambda: not any(p.is_running() for p in mine), timeout_s=PATIENCE_S)


WORKER = """
import asyncio, sys
from pathlib import Path
from paceline_rollout.engines.sglang.make import sglang

async def main():
    engine = sglang(
        model_dir=Path(sys.argv[1]), dtype="float32", max_context=64, max_concurrent=4, threads=1,
        tokenizer_dir=None, job_id="job",
        settings={"python": sys.executable, "module": "paceline_harness.sglang"},
    )
    await engine.start()
    assert "sglang" not in sys.modules
    print("up", flush=True)
    await asyncio.sleep(300)

asyncio.run(main())
"""


async def test_the_server_dies_with_the_worker(model_dir: Path):
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WORKER, str(model_dir), stdout=asyncio.subprocess.PIPE
    )
    assert worker.stdout is not None
    assert await asyncio.wait_for(worker.stdout.readline(), PATIENCE_S) == b"up\n"
    below = psutil.Process(worker.pid).children(recursive=True)
    assert len(below) >= 2
    os.kill(worker.pid, signal.SIGKILL)
    await worker.wait()
    await wait_for(lambda: not any(p.is_running() for p in below), timeout_s=PATIENCE_S)
