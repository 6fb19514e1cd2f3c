"""What a job needs, by the size of its model; figures of docs/sizing.md."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.config import JobSpec, parse_job
from paceline.models.memory import MemoryNeed, ModelSize, needs_of, size_of
from paceline.models.weights import INDEX

ROOT = Path(__file__).parents[4]
SMOLLM2 = ModelSize(parameters=134_515_008, layers=30, hidden=576, token_bytes=23_040)


def job(**changes: Any) -> JobSpec:
    spec: dict[str, Any] = {
        "name": "j",
        "model": {"path": "m", "dtype": "bfloat16"},
        "tasks": {"environment": "arithmetic"},
        "reward": [{"kind": "exact"}],
        "experience": {"max_staleness": 2},
        "trainer": {"dtype": "bfloat16", "tokens_per_micro_batch": 1024},
    }
    for name, value in changes.items():
        spec[name] = {**spec.get(name, {}), **value}
    return parse_job(spec)


def trainer(**changes: Any) -> dict[str, int]:
    """Bytes of its parts."""
    need = needs_of(job(**changes), SMOLLM2)[0]
    return {part.what.split(",")[0].split()[0]: part.num_bytes for part in need.parts}


def total(**changes: Any) -> int:
    return sum(need.num_bytes for need in needs_of(job(**changes), SMOLLM2))


def test_a_trainer_has_weights_gradients_and_both_moments_in_float32_and_a_copy_that_computes() -> (
    None
):
    assert trainer()["weights"] == (16 + 2) * SMOLLM2.parameters
    assert trainer(trainer={"dtype": "float32"})["weights"] == 16 * SMOLLM2.parameters
    assert trainer(trainer={"world_size": 4})["weights"] == 16 * SMOLLM2.parameters // 4


def test_versions_are_bounded_by_staleness_and_by_the_job() -> None:
    version = 2 * SMOLLM2.parameters
    assert trainer(trainer={"mismatch": {"bytes": 1 << 40}})["versions"] == 4 * version
    assert trainer(trainer={"mismatch": {"bytes": 3 * version}})["versions"] == 3 * version
    assert trainer(trainer={"mismatch": {"sequences": 0}})["versions"] == 2 * version


@pytest.mark.parametrize(
    "less",
    [
        {"trainer": {"lora": {"rank": 8}}},
        {"trainer": {"tokens_per_micro_batch": 256}},
        {"trainer": {"gradient_checkpointing": True}},
        {"rollout": {"max_concurrent": 16}},
        {"rollout": {"engine": {"kind": "torch", "packed": False}}},
    ],
)
def test_fields_that_lower_it(less: dict[str, Any]) -> None:
    assert total(**less) < total()


def test_each_rollout_worker_counts() -> None:
    names = [need.process for need in needs_of(job(rollout={"replicas": 3}), SMOLLM2)]
    assert names == ["the trainer", *["a rollout worker"] * 3, "the other services"]


def test_each_rank_counts_and_the_first_serves_versions() -> None:
    first, *further = needs_of(job(trainer={"world_size": 4}), SMOLLM2)[:4]
    (versions,) = (part for part in first.parts if part.what.startswith("versions"))
    assert [need.process for need in further] == ["a further rank"] * 3
    assert {need.num_bytes for need in further} == {first.num_bytes - versions.num_bytes}


def test_what_lowers_it_is_told_largest_first() -> None:
    need = needs_of(job(), SMOLLM2)[0]
    assert [part.lower for part in need.largest] == [
        "trainer.lora",
        "trainer.tokens_per_micro_batch",
    ]
    assert isinstance(need, MemoryNeed)


CONFIG: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "torch_dtype": "bfloat16",
}


def folder(path: Path, text: str, num_bytes: int = 2000) -> Path:
    (path / "config.json").write_text(text)
    (path / "model.safetensors").write_bytes(bytes(num_bytes))
    return path


def test_the_size_of_a_model_comes_from_its_files(tmp_path: Path) -> None:
    found = size_of(folder(tmp_path, json.dumps(CONFIG)))
    assert found == ModelSize(parameters=1000, layers=4, hidden=64, token_bytes=2 * 2 * 4 * 2 * 8)
    nested = size_of(folder(tmp_path, json.dumps({"text_config": CONFIG, "dtype": "float32"})))
    assert nested is not None
    assert nested.parameters == 500


def test_an_index_tells_it_before_the_weights_are_there(tmp_path: Path) -> None:
    folder(tmp_path, json.dumps(CONFIG), num_bytes=0)
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {"total_size": 4000}}))
    found = size_of(tmp_path)
    assert found is not None
    assert found.parameters == 2000
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {}}))
    assert size_of(tmp_path) is None


@pytest.mark.parametrize(
    "text", ["{", "[]", "null", '{"text_config": 3}', json.dumps(CONFIG | {"hidden_size": "wide"})]
)
def test_a_model_that_does_not_tell_it_is_unknown(text: str, tmp_path: Path) -> None:
    assert size_of(folder(tmp_path, text)) is None
    assert size_of(folder(tmp_path, json.dumps(CONFIG), num_bytes=0)) is None
    assert size_of(tmp_path / "none") is None


def test_what_is_said_of_the_quick_start_is_what_it_took() -> None:
    """At most is more than was measured, and not by half: what `validate` says helps to choose."""
    page = (ROOT / "docs" / "quickstart.md").read_text()
    raw = yaml.safe_load(page.partition("`job.yaml`:\n\n```yaml\n")[2].partition("```")[0])
    raw["model"]["dtype"] = raw["trainer"]["dtype"] = "bfloat16"
    for name in ("data", "code"):  # digests, once they are uploaded
        del raw[name]
    raw["tasks"] = {"environment": "arithmetic"}
    raw["reward"] = ["exact"]
    took = json.loads((ROOT / "benchmarks" / "results" / "quick_start.json").read_text())
    found = dict(
        zip(("trainer", "rollout", "others"), needs_of(parse_job(raw), SMOLLM2), strict=True)
    )
    for name, need in found.items():
        gib = need.num_bytes / (1 << 30)
        assert took[f"{name}_gib"] <= gib <= 2 * took[f"{name}_gib"], name
    total = sum(need.num_bytes for need in found.values()) / (1 << 30)
    assert took["total_gib"] <= total <= 1.5 * took["total_gib"]
