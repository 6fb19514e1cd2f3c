"""A tiny model, and real SGLang on a CPU for the tests with its mark."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaConfig

from paceline_harness.patience import PATIENCE_S
from paceline_harness.ports import free_port
from paceline_rollout.engines.sglang.capabilities import parse_version
from paceline_rollout.engines.sglang.server import GUARD, Launch

VOCAB, CONTEXT = 32, 256
START_S = PATIENCE_S


def make_model(seed: int) -> Any:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
        architectures=["LlamaForCausalLM"],
    )
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="session")
def model() -> Any:
    return make_model(0)


@pytest.fixture(scope="session")
def other_model() -> Any:
    return make_model(1)


@pytest.fixture(scope="session")
def model_dir(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model.config.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(VOCAB)}, unk_token="<0>"))
    words.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def launch_of(model_dir: Path) -> Callable[..., Launch]:
    """Makes the launch of a server of the tiny model, given a Python and a log file name."""

    def make(python: str, log: str, **more: Any) -> Launch:
        return Launch(
            python=Path(python),
            model_dir=model_dir,
            log_path=model_dir / log,
            dtype="float32",
            max_context=CONTEXT,
            max_concurrent=16,
            threads=1,
            **more,
        )

    return make


@pytest.fixture(scope="session")
def sglang_url(sglang_python: str, launch_of: Callable[..., Launch]) -> Iterator[str]:
    """One real server, shared by all tests that do not stop it."""
    port = free_port()
    launch = launch_of(sglang_python, "session.log", device="cpu", max_tokens=8192)
    known = parse_version("0.5.23")
    command = launch.command(port=port, capabilities=known)
    with launch.log_path.open("wb") as out:
        server = subprocess.Popen(
            [sys.executable, "-I", str(GUARD), *command],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=out,
            start_new_session=True,
            env=launch.variables(),
        )
    try:
        wait_until_ready(f"http://127.0.0.1:{port}", server, launch.log_path)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.communicate()


def wait_until_ready(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.25)
    raise AssertionError(f"not ready: {log.read_text()[-3000:]}")
