"""Writes a random Llama with a few thousand parameters and a character tokenizer."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

NAMES = ["<pad>", "<bos>", "<eos>", *"0123456789+-*=", " "]


def make(folder: Path, *, positions: int = 64) -> None:
    """Write model and tokenizer in Hugging Face layout."""
    folder.mkdir(parents=True, exist_ok=True)
    words = {name: number for number, name in enumerate(NAMES)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(NAMES[:3])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = dict(zip(("pad_token", "bos_token", "eos_token"), NAMES, strict=False))
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(NAMES),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=positions,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
