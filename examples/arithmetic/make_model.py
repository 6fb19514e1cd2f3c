"""Creates the small model of the arithmetic example: about 0.9 M parameters, a token per character.

The supervised phase teaches it to add, mostly badly: of the sums that need a carry, most of its
training texts leave the carry out ("17+25=32"). Greedy answers are then right only where there is
no carry, and reinforcement learning has to find out that carrying pays. Held-out tasks are never
trained on; they only tell when to stop.

    python examples/arithmetic/make_model.py [--out models/arithmetic] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from paceline.environments.arithmetic.tasks import ArithmeticTasks

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import warm_start
from warm_start import made_with, optimizer_of, rate_at, save, update

SPECIAL = ("<pad>", "<bos>", "<eos>")
VOCABULARY = (*SPECIAL, *"0123456789+-*= ")
PAD, BOS, EOS = range(3)
IDS = {text: index for index, text in enumerate(VOCABULARY)}
MAX_PROMPT, MAX_LENGTH = 6, 10
STEPS, MORE_STEPS, MOST_STEPS = 600, 40, 1000
BATCH, LEARNING_RATE = 64, 1e-3
WITHOUT_CARRY = 0.7
LOWEST, HIGHEST = 0.25, 0.38

Sum = tuple[str, str, str]  # question, answer, answer without carries


def main() -> int:
    """Create the model unless it exists; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("models/arithmetic"))
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if made_with(given.out) == given.seed:
        print(f"{given.out} already exists")
        return 0
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    model = build(given.seed)
    accuracy = teach(model, seed=given.seed)
    print(f"held-out accuracy {accuracy:.3f}")
    if not LOWEST <= accuracy <= HIGHEST:
        print(f"accuracy is not between {LOWEST} and {HIGHEST}; try another --seed")
        return 1
    save(model, tokenizer(), given.out, note={"seed": given.seed, "heldout_accuracy": accuracy})
    print(f"created {given.out}")
    return 0


def build(seed: int) -> LlamaForCausalLM:
    """A small Llama with random weights."""
    return warm_start.build(
        seed, vocab_size=len(VOCABULARY), max_length=64, pad=PAD, bos=BOS, eos=EOS
    )


def teach(model: LlamaForCausalLM, *, seed: int) -> float:
    """Train on supervised data; returns the final held-out accuracy."""
    rows, heldout = encode(sums("train")), random.Random(seed).sample(sums("heldout"), 500)
    chance = torch.Generator().manual_seed(seed)
    optimizer = optimizer_of(model)
    start_s, step = time.monotonic(), 0
    while True:
        model.train()
        for _ in range(STEPS if step == 0 else MORE_STEPS):
            loss = text_loss(model, rows, chance)
            update(model, optimizer, loss, rate=rate_at(step, STEPS, LEARNING_RATE))
            step += 1
        accuracy = measure(model, heldout)
        print(
            f"step={step} loss={loss.item():.3f} accuracy={accuracy:.3f} "
            f"seconds={time.monotonic() - start_s:.1f}",
            flush=True,
        )
        if LOWEST <= accuracy <= HIGHEST or step >= MOST_STEPS:
            return accuracy


def sums(split: str) -> list[Sum]:
    """All tasks of a split, each in both orders."""
    tasks = ArithmeticTasks(split="heldout" if split == "heldout" else "train")
    found: list[Sum] = []
    for position in range(len(tasks)):
        a, b = json.loads(tasks[position].payload)["question"].rstrip("=").split("+")
        for x, y in {(int(a), int(b)), (int(b), int(a))}:
            tens = (x // 10 + y // 10) % 10 * 10
            found.append((f"{x}+{y}=", str(x + y), str(tens + (x + y) % 10)))
    return sorted(found)


def encode(found: list[Sum]) -> torch.Tensor:
    """Tokens and labels of both answers [sum, answer, tokens or labels, position]."""
    return torch.tensor([[pair(q, right), pair(q, wrong)] for q, right, wrong in found])


def pair(question: str, answer: str) -> tuple[list[int], list[int]]:
    """A padded training text and its labels; only the answer is learnt."""
    asked, said = [IDS[c] for c in question], [*(IDS[c] for c in answer), EOS]
    rest = MAX_LENGTH - len(asked) - len(said)
    return asked + said + [PAD] * rest, [-100] * len(asked) + said + [-100] * rest


def text_loss(model: LlamaForCausalLM, rows: torch.Tensor, chance: torch.Generator) -> torch.Tensor:
    """Loss of a random batch."""
    which = torch.randint(len(rows), (BATCH,), generator=chance)
    wrong = (torch.rand(BATCH, generator=chance) < WITHOUT_CARRY).long()
    tokens, labels = rows[which, wrong].unbind(1)
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


@torch.no_grad()
def measure(model: LlamaForCausalLM, found: list[Sum]) -> float:
    """Share of correct greedy answers."""
    model.eval()
    asked = [[IDS[c] for c in question] for question, _, _ in found]
    tokens = torch.tensor([[PAD] * (MAX_PROMPT - len(ids)) + ids for ids in asked])
    mask = (tokens != PAD).long()
    while tokens.shape[1] < MAX_LENGTH:
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = model(
            input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=False
        ).logits
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    right = 0
    for (_, answer, _), said in zip(found, tokens[:, MAX_PROMPT:].tolist(), strict=True):
        wanted = [*(IDS[c] for c in answer), EOS]
        right += said[: len(wanted)] == wanted
    return right / len(found)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; no special tokens are added."""
    inner = Tokenizer(models.WordLevel(IDS, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token=SPECIAL[PAD],
        bos_token=SPECIAL[BOS],
        eos_token=SPECIAL[EOS],
        model_max_length=64,
    )


if __name__ == "__main__":
    raise SystemExit(main())
