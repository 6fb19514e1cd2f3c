"""SGLang skips tensors whose names it does not know, so what it has not loaded is found."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from paceline.errors import MisfitError
from paceline.testing.engines import Answers, ask
from paceline.testing.engines import snapshot as snapshot_of
from paceline.weights.names import CheckpointNames
from paceline_harness.models.families import save_family
from paceline_rollout.engines.sglang.make import sglang
from paceline_rollout.engines.sglang.proof import ProofByChanges, kept_tensors

CONTEXT = 64
Open = Callable[..., Any]


class Checkpoint:
    """A model whose parameters are those of a checkpoint, for `snapshot`."""

    def __init__(self, model: Any) -> None:
        names, memory = CheckpointNames(model.config), model.state_dict()
        self._tensors = {
            name: value
            for conversion in names.conversions
            for name, value in names.to_checkpoint(conversion, memory).items()
        }

    def named_parameters(self) -> list[tuple[str, Any]]:
        return list(self._tensors.items())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family("qwen3_moe", tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@asynccontextmanager
async def opened(folder: Path, *args: str, **options: Any) -> AsyncGenerator[Answers]:
    settings = {"python": sys.executable, "module": "paceline_harness.sglang", "args": list(args)}
    engine = sglang(
        model_dir=folder,
        dtype="float32",
        max_context=CONTEXT,
        max_concurrent=4,
        threads=1,
        tokenizer_dir=None,
        job_id="job",
        settings=settings,
        **options,
    )
    await engine.start()
    answers = Answers(engine)
    try:
        yield answers
    finally:
        await engine.close()
        await answers.task


@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 5000}, {"load": "disk"}], ids=str)
async def test_all_experts_are_loaded(folder: Path, model: Any, options: dict[str, Any]) -> None:
    async with opened(folder, **options) as out:
        for version in range(2):
            await out.engine.load(
                snapshot_of(Checkpoint(model), version, names="checkpoint"), "in_flight"
            )
        assert out.engine.status().version == 1


@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 5000}, {"load": "disk"}], ids=str)
@pytest.mark.parametrize(
    ("forgets", "own"),
    [
        ("experts", r"4 of its tensors.*: model\.layers\.0\.mlp\.experts\.w13_weight, "),
        (
            "layers.1.self_attn.q_norm",
            r"1 of its tensors.*: model\.layers\.1\.self_attn\.q_norm\.weight",
        ),
        ("lm_head", r"1 of its tensors.*: lm_head\.weight;"),
    ],
)
async def test_a_server_that_leaves_tensors_out_serves_nothing(
    folder: Path, model: Any, forgets: str, own: str, options: dict[str, Any]
) -> None:
    async with opened(folder, f"--fake-forgets={forgets}", **options) as out:
        for version in range(2):
            with pytest.raises(MisfitError, match=own):
                await out.engine.load(
                    snapshot_of(Checkpoint(model), version, names="checkpoint"), "in_flight"
                )
            assert out.engine.status().version == -1
            refused = (await out.run(ask(f"{version}")))[0]
            assert refused.error_code == "UNAVAILABLE"
            assert "w13_weight" in refused.error or forgets != "experts"


@pytest.mark.parametrize(
    ("part", "own"),
    [
        ("layers.1.self_attn.q_norm", ["model.layers.1.self_attn.q_norm.weight"]),
        ("layers.0.mlp.experts", ["model.layers.0.mlp.experts.w13_weight"]),
        ("layers.1.self_attn.", ["model.layers.1.self_attn.qkv_proj.weight"]),
        ("embed_tokens", ["model.embed_tokens.weight"]),
        ("never", []),
    ],
)
async def test_what_a_server_leaves_out_of_a_later_version_is_found(
    folder: Path, part: str, own: list[str]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    async with opened(folder, f"--fake-forgets={part}@2") as out:
        engine: Any = out.engine
        for version in range(3):
            given = snapshot_of(Checkpoint(model), version, names="checkpoint")
            await engine.load(given, "in_flight")
            unequal = await engine.unequal(given)
            assert set(own) <= set(unequal) if version == 2 else not unequal
            assert bool(unequal) == (bool(own) and version == 2)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.01).add_(0.001)


TENSORS = tuple(f"model.layers.0.attention.{name}.weight" for name in ("norm", "q", "k"))
FUSED = "model.layers.0.attention.qk_proj.weight"
OWN = {TENSORS[0]: (0,), FUSED: (1, 2)}


@given(
    changes=st.lists(st.tuples(*[st.booleans()] * 3), min_size=1, max_size=5),
    wrong=st.sampled_from(["", *OWN]),
    extra=st.booleans(),
)
async def test_a_checksum_changes_exactly_with_the_tensors_it_is_made_of(
    changes: list[tuple[bool, ...]], wrong: str, extra: bool
) -> None:
    """Of fused ones as far as all of their parts change; `extra`: one changes by itself."""
    proof, values = ProofByChanges(), [0, 0, 0]
    stale = dict[str, tuple[int, ...]]()
    for number, change in enumerate([(False,) * 3, *changes]):
        values = [value + is_new for value, is_new in zip(values, change, strict=True)]
        last = number == len(changes)
        sums: dict[str, str] = {}
        for own, parts in OWN.items():
            now = tuple(values[part] for part in parts)
            if not (last and own == wrong and not extra):
                stale[own] = now
            sums[own] = f"{stale[own]}{extra and last and own == wrong}"
        unequal = await proof.unequal(
            Sums(sums),  # pyright: ignore[reportArgumentType]
            SnapshotOf(values),  # pyright: ignore[reportArgumentType]
            loaded=lambda: True,
        )
        if not last or not wrong:
            assert unequal == []
        elif wrong == TENSORS[0]:
            assert unequal == ([wrong] if extra != change[0] else [])
        else:
            assert unequal == ([wrong] if all(change[1:]) and not extra else [])


class Sums:
    """A server with these checksums."""

    def __init__(self, sums: dict[str, str]) -> None:
        self._sums = sums

    async def checksums(self) -> list[dict[str, str]]:
        return [self._sums]


class SnapshotOf:
    """Tensors that are a number each."""

    def __init__(self, values: list[int]) -> None:
        self._values = values

    def tensors(self) -> Iterator[tuple[Any, memoryview]]:
        for name, value in zip(TENSORS, self._values, strict=True):
            yield SimpleNamespace(name=name), memoryview(bytes([value]))


async def test_tensors_with_names_of_memory_do_not_reach_the_server(
    folder: Path, model: Any
) -> None:
    async with opened(folder) as out:
        with pytest.raises(MisfitError, match=r"experts\.\w+' is unknown .*\(and 3 more\)"):
            await out.engine.load(snapshot_of(model, 0), "in_flight")


NAMES = st.sampled_from(["a.weight", "b.w13_weight", "c.bias", "rotary.cos_sin_cache"])
RANK = st.dictionaries(NAMES, st.sampled_from("xyz"))


@given(st.lists(st.tuples(RANK, RANK), max_size=3))
def test_what_is_kept_is_what_some_rank_has_not_replaced(
    ranks: list[tuple[dict[str, str], dict[str, str]]],
) -> None:
    kept = kept_tensors([before for before, _ in ranks], [after for _, after in ranks])
    same = {n for before, after in ranks for n in before.items() & after.items()}
    assert kept == sorted({name for name, _ in same if name != "rotary.cos_sin_cache"})
