"""What a `config.json` describes is computed, with random weights, before its job is accepted."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.errors import ConfigError
from paceline.front.local import fork_server
from paceline.front.local.fork_server import PRELOADED
from paceline.front.local.processes import Processes
from paceline.isolation.sandbox import landlock
from paceline_gateway.submit.probe import ModelProbe

pytestmark = [
    pytest.mark.skipif(landlock.abi() < 6, reason="needs Landlock with scopes"),
    pytest.mark.skipif(not fork_server.is_useful(), reason="this machine has a GPU"),
]
LLAMA: dict[str, Any] = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """That of a controller whose fork server runs; its path is longer than a socket's may be."""
    folder = tmp_path_factory.mktemp("long" * 30)
    processes = Processes(folder=folder / "processes", logs=folder, preloaded=PRELOADED)
    yield folder
    processes.close()


async def refusal(probe: ModelProbe, engine: str, config: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as refused:
        await probe.check(json.dumps(config).encode(), engine, "a")
    return refused.value.message


def names_of(folder: Path) -> list[str]:
    """Of processes that have a folder in their command."""
    found = (each.info for each in psutil.process_iter(["name", "cmdline"]))
    return [each["name"] for each in found if str(folder) in " ".join(each["cmdline"] or [])]


async def test_trainer_and_engine_say_what_they_cannot_compute(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: Callable[..., None]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    probe = ModelProbe(run_dir)
    await probe.check(json.dumps(LLAMA).encode(), "torch", "a")
    told = await refusal(probe, "torch", LLAMA | {"hidden_act": "wave"})
    assert told.startswith("model.path: model type 'llama': this trainer cannot train it (")
    assert "wave" in told
    assert "the torch engine cannot compute it" in told
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_experts": 16, "head_dim": 16}
    hybrid = {"model_type": "qwen3_next", "linear_num_value_heads": 16, **sizes}
    assert "linear_attention" in await refusal(probe, "torch", hybrid)
    await probe.check(json.dumps(hybrid).encode(), "sglang", "a")  # which has such layers
    assert "size (100)" in await refusal(
        probe, "sglang", LLAMA | {"hidden_size": 100, "num_attention_heads": 3}
    )
    assert not [*tmp_path.iterdir()]
    until(lambda: not names_of(tmp_path), "that its processes are gone")


async def test_jobs_of_the_same_model_ask_once_together(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    probe = ModelProbe(run_dir)
    config = json.dumps(LLAMA | {"max_position_embeddings": 77}).encode()
    checks = asyncio.gather(*(probe.check(config, "torch", "a") for _ in range(12)))
    asked = set[str]()
    while not checks.done():
        asked |= {path.name for path in tmp_path.iterdir()}
        await asyncio.sleep(0.01)
    await checks
    assert len(asked) == 2  # for the trainer, and for the engine


async def test_without_a_fork_server_a_new_process_is_asked(tmp_path: Path) -> None:
    assert "`model_type`" in await refusal(ModelProbe(tmp_path), "simulated", {})


async def test_a_tenant_takes_no_places_of_others_even_if_it_does_not_wait_for_answers(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    probe = ModelProbe(run_dir)

    def ask(number: int, tenant: str) -> asyncio.Task[None]:
        config = json.dumps(LLAMA | {"max_position_embeddings": 100 + number}).encode()
        return asyncio.create_task(probe.check(config, "torch", tenant))

    most = 0
    for number in range(4):
        given_up = ask(number, "a")
        await asyncio.sleep(0.05)
        given_up.cancel()
        most = max(most, len([*tmp_path.iterdir()]))
    waiting = [ask(number, "a") for number in range(10, 13)]
    await ask(20, "b")
    assert not all(each.done() for each in waiting)
    assert most == 2
    await asyncio.gather(*waiting)
