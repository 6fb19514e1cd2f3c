"""Training steps of TRL, or of plain Hugging Face and AdamW; run by `step_beside_trl.py`.

    .venv-trl/bin/python benchmarks/with_trl/step.py CASE.json OUT.json

Knows nothing of Paceline. Every step trains on the same batch, which is not generated.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class FixedBatch(GRPOTrainer):
    """GRPO whose completions, log-probabilities and advantages are given."""

    given: dict[str, Any]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        return dict(self.given)


class Clock(TrainerCallback):
    """When each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Note the time."""
        self.ends.append(time.perf_counter())


def main() -> int:
    """Run the steps and write when each ended."""
    case = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(case["threads"])
    model = AutoModelForCausalLM.from_pretrained(case["model"], dtype=torch.float32)
    run = of_trl if case["side"] == "trl" else plain
    Path(sys.argv[2]).write_text(json.dumps({"ends": run(case, model)}))
    return 0


def tensors(case: dict[str, Any]) -> dict[str, Any]:
    """The batch as TRL's loss takes it."""
    rows = case["batch"]
    prompts = torch.tensor([row["prompt"] for row in rows])
    answers = torch.tensor([row["answer"] for row in rows])
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": answers,
        "completion_mask": torch.ones_like(answers),
        "advantages": torch.tensor([row["advantage"] for row in rows]),
        "old_per_token_logps": torch.tensor([row["logprobs"] for row in rows]),
        "num_items_in_batch": torch.tensor(answers.numel()),
    }


def of_trl(case: dict[str, Any], model: Any) -> list[float]:
    """Steps of TRL's trainer."""
    size, part = len(case["batch"]), case["micro_batch"]
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=part,
            gradient_accumulation_steps=size // part,
            num_generations=case["group"],
            max_steps=case["steps"],
            learning_rate=1e-6,
            max_grad_norm=1.0,
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
        )
        trainer = FixedBatch(
            model=model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=config,
            train_dataset=Dataset.from_list([{"prompt": "a"}] * size),
            processing_class=AutoTokenizer.from_pretrained(case["tokenizer"]),
            callbacks=[clock],
        )
        trainer.given = tensors(case)
        trainer.train()
    return clock.ends


def plain(case: dict[str, Any], model: Any) -> list[float]:
    """The loop that one would write by hand: padded micro-batches, PPO's clip, AdamW."""
    given = tensors(case)
    tokens = torch.cat([given["prompt_ids"], given["completion_ids"]], dim=1)
    answer = given["completion_ids"].size(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)
    half = torch.autocast("cpu", torch.bfloat16, enabled=case["dtype"] == "bfloat16")
    model.train()
    ends: list[float] = []
    for _ in range(case["steps"]):
        for start in range(0, len(tokens), case["micro_batch"]):
            part = slice(start, start + case["micro_batch"])
            with half:
                out = model(input_ids=tokens[part], logits_to_keep=answer + 1, use_cache=False)
            chosen = out.logits[:, :-1].float().log_softmax(-1)
            logps = chosen.gather(-1, given["completion_ids"][part, :, None])[..., 0]
            ratio = (logps - given["old_per_token_logps"][part]).exp()
            advantages = given["advantages"][part, None]
            surrogate = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            (-surrogate.sum() / given["num_items_in_batch"]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
    return ends


if __name__ == "__main__":
    sys.exit(main())
