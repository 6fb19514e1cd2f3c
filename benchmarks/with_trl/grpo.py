"""TRL's GRPO on the tasks of a file; run by `bench_trl.py` in an environment of its own.

    .venv-trl/bin/python benchmarks/with_trl/grpo.py CASE.json OUT.json

Knows nothing of Paceline. The clock stops during evaluations.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """Seconds of each step, and the held-out reward over time."""

    def __init__(self, case: dict[str, Any], score: Callable[[str, str], float]) -> None:
        self.steps: list[float] = []
        self.curve: list[tuple[int, float, float]] = []  # steps, seconds so far, reward
        self._case, self._score = case, score
        self._started = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """The first evaluation, then the clock starts."""
        self._measure(0, given["model"], given["processing_class"])
        self._started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Note the time, then evaluate if it is due."""
        self.steps.append(time.perf_counter() - self._started)
        every = self._case["eval_every"]
        if every and state.global_step % every == 0:
            self._measure(state.global_step, given["model"], given["processing_class"])
        self._started = time.perf_counter()

    @torch.no_grad()
    def _measure(self, step: int, model: Any, tokenizer: Any) -> None:
        rows = self._case["heldout"]
        if not rows or not self._case["eval_every"]:
            return
        was_training = model.training
        model.eval()
        total = 0.0
        for start in range(0, len(rows), 128):
            part = rows[start : start + 128]
            ids = tokenizer(
                [row["prompt"] for row in part],
                return_tensors="pt",
                padding=True,
                padding_side="left",
            )
            out = model.generate(
                **ids, max_new_tokens=self._case["max_tokens"], do_sample=False, use_cache=True
            )
            texts = tokenizer.batch_decode(
                out[:, ids["input_ids"].shape[1] :], skip_special_tokens=True
            )
            total += sum(map(self._score, texts, (row["answer"] for row in part)))
        model.train(was_training)
        self.curve.append((step, sum(self.steps), total / len(rows)))


def main() -> int:
    """Train as the case says, and write what the clock saw."""
    case = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(case["threads"])
    score = scorer(case["pattern"])
    clock = Clock(case, score)
    size = case["batch_groups"] * case["group_size"]
    config = GRPOConfig(
        output_dir=case["folder"],
        per_device_train_batch_size=case["micro_batch"],
        gradient_accumulation_steps=size // case["micro_batch"],
        num_generations=case["group_size"],
        max_completion_length=case["max_tokens"],
        temperature=case["temperature"],
        max_steps=case["steps"],
        learning_rate=case["lr"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=case["warmup_steps"],
        adam_beta1=0.9,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        weight_decay=0.0,
        beta=0.0,
        bf16=case["dtype"] == "bfloat16",
        use_cpu=True,
        shuffle_dataset=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=case["seed"],
    )
    model = AutoModelForCausalLM.from_pretrained(case["model"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(case["model"])
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward(score, case["latency_s"], case["seed"]),
        args=config,
        train_dataset=Dataset.from_list(case["tasks"]),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    steady = clock.steps[case["warm"] :]
    found = {
        "threads": case["threads"],
        "step_s": statistics.median(steady),
        "samples_per_s": size * len(steady) / sum(steady),
        "curve": clock.curve,
    }
    Path(sys.argv[2]).write_text(json.dumps(found))
    return 0


def scorer(pattern: str) -> Callable[[str, str], float]:
    """1 if the text, or what the pattern finds in it, is the answer."""
    compiled = re.compile(pattern) if pattern else None

    def score(text: str, answer: str) -> float:
        if compiled is None:
            return float(text.strip() == answer)
        found = compiled.search(text)
        return float(found is not None and found["answer"] == answer)

    return score


def reward(score: Callable[[str, str], float], latency_s: Any, seed: int) -> Callable[..., Any]:
    """A reward function; with a latency an asynchronous one, all samples of a step at once."""

    def plain(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [score(text, right) for text, right in zip(completions, answer, strict=True)]

    if latency_s is None:
        return plain
    chance = random.Random(seed)

    async def one(text: str, right: str) -> float:
        for _ in range(latency_s["calls"]):
            await asyncio.sleep(chance.lognormvariate(latency_s["mu"], latency_s["sigma"]))
        return score(text, right)

    async def slow(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return list(await asyncio.gather(*map(one, completions, answer)))

    return slow


if __name__ == "__main__":
    sys.exit(main())
