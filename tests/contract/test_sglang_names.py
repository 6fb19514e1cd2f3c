"""SGLang skips tensors whose names it does not know, so what it has not loaded is found."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from paceline.errors import MisfitError
from paceline.testing.engines import Answers, ask
from paceline.testing.engines import snapshot as snapshot_of
from paceline.weights.names import CheckpointNames
from paceline_harness.models.families import save_family
from paceline_rollout.engines.sglang.make import sglang
from paceline_rollout.engines.sglang.proof import kept_tensors

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
