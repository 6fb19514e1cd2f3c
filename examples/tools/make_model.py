"""Creates the small chat models of the examples with several turns.

Each has about a million parameters, a chat template with tools like Qwen2.5's, and a tokenizer for
the phrases of its world. The supervised phase shows it episodes that are played by rule: first with
care, so that it can do what is needed, then mostly without (see demonstrations.py), so that its
greedy answers use the tools too rarely, or play without method. Held-out tasks are never trained
on; they only tell how good the model is.

    python examples/tools/make_model.py tools [--out models/tools] [--seed 0]
    python examples/tools/make_model.py guess_number | key_door | chain
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from demonstrations import GAMES, Game, Move, demonstrations
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from paceline.plugins import Environment, Message, Observation
from paceline.tokens.chat import Tokenizer
from paceline.tokens.dialogue import Dialogue

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import warm_start
from warm_start import made_with, optimizer_of, rate_at, save, update

SPECIAL = ("<pad>", "<|im_start|>", "<|im_end|>")
PAD, START, END = range(3)
TAGS = ("<tools>", "</tools>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TEMPLATE = Path(__file__).with_name("chat_template.jinja")
TAG = re.compile(r"<[^<>\n]+>")
VOCABULARY = 640
MAX_LENGTH = 256
DEMONSTRATIONS, STEPS, CAREFUL_STEPS, BATCH, LEARNING_RATE = 3000, 360, 300, 32, 2e-3
MEASURED, MAX_NEW = 100, 40
LOWEST, HIGHEST = 0.15, 0.55

Row = tuple[list[int], list[int]]  # tokens and labels


def main() -> int:
    """Create the model unless it exists; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("world", choices=sorted(GAMES))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--steps", type=int, default=STEPS, help="fewer: it knows the format, and is not measured"
    )
    given = parser.parse_args()
    out = given.out or Path("models") / given.world
    if made_with(out) == given.seed:
        print(f"{out} already exists")
        return 0
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    game = GAMES[given.world]
    played = [
        list(demonstrations(game, count=DEMONSTRATIONS, seed=given.seed, careful=careful))
        for careful in (True, False)
    ]
    tokenizer = tokenizer_of(game, [*played[0], *played[1]])
    model = warm_start.build(
        given.seed, vocab_size=len(tokenizer), max_length=MAX_LENGTH, pad=PAD, bos=START, eos=END
    )
    chat = chat_of(tokenizer.backend_tokenizer)
    careful, careless = ([row_of(chat, turns) for turns in each] for each in played)
    teach(model, careful, careless, seed=given.seed, steps=given.steps)
    note: dict[str, float] = {"seed": given.seed}
    if given.steps < STEPS:
        note["steps"] = given.steps
    else:
        reward = note["heldout_reward"] = measure(model, chat, game)
        print(f"held-out reward {reward:.3f}")
        if not LOWEST <= reward <= HIGHEST:
            print(f"it is not between {LOWEST} and {HIGHEST}; try another --seed")
            return 1
    save(model, tokenizer, out, note=note)
    print(f"created {out}")
    return 0


def tokenizer_of(game: Game, played: Iterable[list[Move]]) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer trained on what was said and shown."""
    inner = FastTokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(game.pieces), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=game.frequent,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    chat = chat_of(inner)  # which cannot be read while it is trained
    texts = (piece for turns in played for piece in TAG.split(text_of(chat, turns)))
    inner.train_from_iterator(texts, trainer)
    inner.add_tokens([AddedToken(tag, special=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token=SPECIAL[PAD],
        bos_token=SPECIAL[START],
        eos_token=SPECIAL[END],
        chat_template=TEMPLATE.read_text(),
        model_max_length=MAX_LENGTH,
    )


def chat_of(inner: FastTokenizer) -> Tokenizer:
    """The same tokenizer and template as environments use them."""
    special = {"bos_token": SPECIAL[START], "eos_token": SPECIAL[END]}
    return Tokenizer(fast=inner, special=special, template=TEMPLATE.read_text(), eos=(END,))


def text_of(chat: Tokenizer, turns: list[Move]) -> str:
    """An episode as the template shows it."""
    messages: list[Message] = []
    for turn in turns:
        messages += [*turn.shown.messages, Message("assistant", turn.said)]
    return chat.render(messages, tools=turns[0].shown.tools)


def row_of(chat: Tokenizer, turns: list[Move]) -> Row:
    """Tokens of an episode, and their labels; only what was said is learnt."""
    dialogue, tokens, labels = Dialogue(chat), list[int](), list[int]()
    for turn in turns:
        shown = dialogue.show(turn.shown).tokens
        said = [*chat.encode(turn.said), END]
        dialogue.turn(said)
        tokens += [*shown, *said]
        labels += [-100] * len(shown) + said
    return tokens, labels


def teach(
    model: LlamaForCausalLM, careful: list[Row], careless: list[Row], *, seed: int, steps: int
) -> None:
    """Train on episodes with care, and then on those without."""
    chance, optimizer = random.Random(seed), optimizer_of(model)
    started = time.monotonic()
    model.train()
    for step in range(steps):
        batch = chance.sample(careful if step < CAREFUL_STEPS else careless, BATCH)
        longest = max(len(tokens) for tokens, _ in batch)
        tokens = torch.tensor([row + [PAD] * (longest - len(row)) for row, _ in batch])
        labels = torch.tensor([row + [-100] * (longest - len(row)) for _, row in batch])
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
        loss = functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        update(model, optimizer, loss, rate=rate_at(step, steps, LEARNING_RATE))
        if step % 50 == 49:
            seconds = time.monotonic() - started
            print(f"step={step + 1} loss={loss.item():.3f} seconds={seconds:.1f}", flush=True)


@dataclass(slots=True)
class Playing:
    """An episode of the model."""

    world: Environment
    dialogue: Dialogue
    tokens: list[int]
    reward: float = 0.0
    over: bool = False

    def show(self, shown: Observation) -> None:
        """Append what the world says."""
        self.tokens += self.dialogue.show(shown).tokens


def measure(model: LlamaForCausalLM, chat: Tokenizer, game: Game) -> float:
    """Mean reward of greedy answers on held-out tasks."""
    return asyncio.run(_measured(model, chat, game))


async def _measured(model: LlamaForCausalLM, chat: Tokenizer, game: Game) -> float:
    tasks, episodes = game.tasks("heldout"), list[Playing]()
    for position in range(MEASURED):
        episodes.append(Playing(game.world(), Dialogue(chat), []))
        episodes[-1].show(await episodes[-1].world.reset(tasks[position], 0))
    model.eval()
    while going := [each for each in episodes if not each.over]:
        for each, said in zip(going, _said(model, [each.tokens for each in going]), strict=True):
            each.tokens += said
            each.dialogue.turn(said)
            result = await each.world.step(chat.turn_text(said, keep_special=True))
            each.reward += result.reward
            each.over = result.done
            if not each.over:
                each.show(result.observation)
    return sum(each.reward for each in episodes) / len(episodes)


@torch.no_grad()
def _said(model: LlamaForCausalLM, prompts: list[list[int]]) -> Iterator[list[int]]:
    """The greedy turn after each prompt, with its end token."""
    longest = max(map(len, prompts))
    tokens = torch.tensor([[PAD] * (longest - len(row)) + row for row in prompts])
    found = model.generate(  # type: ignore[call-overload]
        tokens,
        attention_mask=(tokens != PAD).long(),
        do_sample=False,
        max_new_tokens=MAX_NEW,
        eos_token_id=END,
        pad_token_id=PAD,
    )
    for row in found[:, longest:].tolist():
        yield row[: row.index(END) + 1] if END in row else row


if __name__ == "__main__":
    raise SystemExit(main())
