"""Checks an installation with a job of two steps; `helm test` runs it.

The model is random and its engine simulated, so it takes a minute and no accelerator; everything
else is real: gateway, ledger, controller, environment, reward, rollout and trainer.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import yaml

from paceline.enums import JobState
from paceline.errors import PacelineError
from paceline.front.client.client import Client
from paceline.platform.program import importing, leave

POLL_S = 1.0
SPECIAL = ("<pad>", "<bos>", "<eos>")
TOKENS = (*SPECIAL, *"0123456789+-*= ")


def main(arguments: Sequence[str]) -> int:
    """Run the job; returns 0 if it has succeeded."""
    parser = argparse.ArgumentParser("python -m paceline_trainer.smoke_test")
    parser.add_argument("--url", required=True, help="of the gateway's REST API")
    parser.add_argument("--token-file", type=Path, required=True, help="YAML with `token: TOKEN`")
    parser.add_argument("--folder", type=Path, required=True, help="seen by gateway and trainer")
    parser.add_argument("--timeout-s", type=float, default=900.0)
    options = parser.parse_args(arguments)
    token = yaml.safe_load(options.token_file.read_text())["token"]
    model = options.folder / f"smoke-test-{uuid4().hex[:8]}"
    try:
        make_model(model)
        with Client(options.url, token=token, outage_s=60.0) as client:
            return _run(client, job_of(model), timeout_s=options.timeout_s)
    except PacelineError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(model, ignore_errors=True)


def job_of(model: Path) -> dict[str, Any]:
    """The job, as a document."""
    return {
        "name": "smoke-test",
        "model": {"path": str(model), "dtype": "float32"},
        "tasks": {"environment": "arithmetic", "options": {"digits": 1}},
        "sampling": {"max_tokens": 4, "max_context": 32},
        "reward": [{"kind": "exact"}],
        "experience": {"batch_groups": 2, "group_size": 2, "filters": []},
        "rollout": {"engine": {"kind": "simulated"}},
        "trainer": {"checkpoint": {"every": 2}},
        "stop": {"steps": 2},
    }


def make_model(folder: Path) -> None:
    """Save a random Llama with a few thousand parameters and a character tokenizer."""
    with importing():
        import torch
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True)
    words = {text: number for number, text in enumerate(TOKENS)}
    tokenizer: Any = Tokenizer(models.WordLevel(words, unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    names = dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def _run(client: Client, job: Mapping[str, Any], *, timeout_s: float) -> int:
    """Submit the job, print its progress, wait for its end; cancel it after `timeout_s`."""
    job_id, printed = client.submit(job).status.job_id, ""
    deadline = time.monotonic() + timeout_s
    while True:
        status = client.get(job_id).status
        line = f"{job_id} {status.state} step {status.step} {status.reason}".rstrip()
        if line != printed:
            print(line, flush=True)
            printed = line
        if status.state.terminal:
            return 0 if status.state is JobState.SUCCEEDED else 1
        if time.monotonic() > deadline:
            client.cancel(job_id, reason="the smoke test has timed out")
            print(f"{job_id} did not succeed within {timeout_s:.0f} s", file=sys.stderr)
            return 1
        time.sleep(POLL_S)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
