"""Snapshots reached only through deltas equal the trainer's, bit by bit."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.weights import SnapshotHeader, Staging, plan
from paceline.weights.snapshot.delta import decode_into, encode, item_sizes

ROOT = Path(__file__).parents[4]
VERSIONS, BATCH = 120, 8
CHUNK_BYTES = 1 << 16  # several per snapshot, even for the small model
DTYPES = ("float32", "bfloat16")


def small(vocab_size: int) -> Any:
    """A tenth of the example's model: the test needs many steps, not many weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=160,
        max_position_embeddings=64,
        initializer_range=0.06,
        tie_word_embeddings=False,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def steps(model: Any, rows: torch.Tensor) -> Iterator[dict[str, torch.Tensor]]:
    """Weights before the first and after every step of AdamW on texts of the example."""
    torch.set_num_threads(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95))
    chance = torch.Generator().manual_seed(0)
    while True:
        yield {name: value.detach() for name, value in model.named_parameters()}
        tokens, labels = rows[torch.randint(len(rows), (BATCH,), generator=chance), 0].unbind(1)
        optimizer.zero_grad()
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
        functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def staged(
    weights: dict[str, torch.Tensor],
    *,
    dtype: str,
    version: int,
    tied: tuple[tuple[str, str], ...] = (),
) -> Staging:
    """A snapshot in that precision, as a trainer publishes it."""
    kept = {name: value for name, value in weights.items() if name not in dict(tied)}
    entries, size = plan([(name, dtype, tuple(value.shape)) for name, value in kept.items()])
    header = SnapshotHeader(
        "job", version, version, version - 1, -1, 1, size, CHUNK_BYTES, entries, tied
    )
    staging = Staging(header, key=bytes(range(32)))
    for entry in entries:
        value = kept[entry.name].to(getattr(torch, dtype)).contiguous()
        staging.fill(entry.offset, value.view(torch.uint8).numpy().tobytes())
    staging.finish()
    return staging


def follow(source: Staging, base: Staging, sizes: tuple[int, ...]) -> tuple[Staging, int]:
    """The source as received by a holder of the base, and the number of bytes sent."""
    target, sent = Staging(source.header, key=source.key), 0
    for index, item_bytes in enumerate(sizes):
        payload = encode(source.slot(index), base.slot(index), item_bytes=item_bytes)
        if payload is None:
            payload = bytes(source.slot(index))
            target.slot(index)[:] = payload
        else:
            decode_into(payload, base.slot(index), target.slot(index))
        target.put(index, source.authenticator.digest(source.slot(index), index))
        sent += len(payload)
    return target, sent


def test_a_model_with_tied_weights_goes_through_staging() -> None:
    script = runpy.run_path(str(ROOT / "examples/arithmetic/make_model.py"))
    model, tied = script["build"](0), (("lm_head.weight", "model.embed_tokens.weight"),)
    weights = {name: value.detach() for name, value in model.named_parameters()}
    base = staged(weights, dtype="bfloat16", version=1, tied=tied)
    moved = {name: value + 1e-3 * torch.randn_like(value) for name, value in weights.items()}
    source = staged(moved, dtype="bfloat16", version=2, tied=tied)
    sizes = item_sizes(source.header)
    assert set(sizes) == {2}
    target, sent = follow(source, base, sizes)
    assert target.complete
    assert target.root == source.root
    assert sent < source.header.num_bytes / 2
    assert [bytes(data) for _, data in target.tensors()] == [
        bytes(data) for _, data in source.tensors()
    ]
    assert dict(target.header.tied) == dict(tied)
    assert tied[0][0] not in {entry.name for entry, _ in target.tensors()}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_more_than_a_hundred_deltas_end_at_the_full_snapshot() -> None:
    script = runpy.run_path(str(ROOT / "examples/arithmetic/make_model.py"))
    rows = script["encode"](script["sums"]("train"))
    made = steps(small(len(script["VOCABULARY"])), rows)
    first = next(made)
    held = {dtype: staged(first, dtype=dtype, version=0) for dtype in DTYPES}
    sent, full = dict.fromkeys(DTYPES, 0), dict.fromkeys(DTYPES, 0)
    for version, weights in zip(range(1, VERSIONS + 1), made, strict=False):
        for dtype in DTYPES:
            source = staged(weights, dtype=dtype, version=version)
            held[dtype], num_bytes = follow(source, held[dtype], item_sizes(source.header))
            sent[dtype] += num_bytes
            full[dtype] += source.header.num_bytes
            if version % 100 == 0:
                assert held[dtype].root == source.root
                same(held[dtype], weights)
    assert [staging.header.version for staging in held.values()] == [VERSIONS] * len(DTYPES)
    assert sent["float32"] < 0.75 * full["float32"]
    assert sent["bfloat16"] < 0.25 * full["bfloat16"]


def same(held: Staging, weights: dict[str, torch.Tensor]) -> None:
    """Compare each tensor with the trainer's, bit by bit."""
    found = list(held.tensors())
    assert {entry.name for entry, _ in found} == set(weights)
    for entry, data in found:
        value = weights[entry.name].to(getattr(torch, entry.dtype)).contiguous()
        assert bytes(data) == value.view(torch.uint8).numpy().tobytes()
