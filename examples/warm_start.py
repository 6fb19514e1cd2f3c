"""What the scripts that make small models share: their architecture, updates and folder."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def build(
    seed: int, *, vocab_size: int, max_length: int, pad: int, bos: int, eos: int
) -> LlamaForCausalLM:
    """A Llama of about 0.9 million parameters with random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=384,
        max_position_embeddings=max_length,
        # Narrow layers need larger weights than the default to learn fast.
        initializer_range=0.06,
        tie_word_embeddings=False,
        pad_token_id=pad,
        bos_token_id=bos,
        eos_token_id=eos,
    )
    return LlamaForCausalLM(config)


def optimizer_of(model: LlamaForCausalLM) -> torch.optim.Optimizer:
    """The optimiser of the supervised phase."""
    return torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.0)


def update(
    model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, loss: torch.Tensor, *, rate: float
) -> None:
    """One step on a loss."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def rate_at(step: int, steps: int, peak: float) -> float:
    """The learning rate: a short rise, then a level, then a fall over the last third."""
    return peak * max(min(1.0, step / 20, (steps - step) / (steps * 0.3)), 0.05)


def made_with(out: Path) -> int | None:
    """Seed of the existing model."""
    note = out / "made.json"
    return int(json.loads(note.read_text())["seed"]) if note.exists() else None


def save(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    out: Path,
    *,
    note: dict[str, float],
) -> None:
    """Save in Hugging Face layout; the folder appears only once it is complete."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        made = Path(scratch) / "model"
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        (made / "made.json").write_text(json.dumps(note) + "\n")
        for path in made.iterdir():
            path.chmod(0o644)
        shutil.rmtree(out, ignore_errors=True)
        made.rename(out)
