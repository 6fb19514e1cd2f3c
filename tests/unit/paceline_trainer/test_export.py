"""Exported folders: what transformers and peft load is the policy of the checkpoint."""

from __future__ import annotations

import io
import json
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from paceline.config.job import OptimizerSpec
from paceline.config.sections.lora import LoraSpec
from paceline.errors import ConfigError, IntegrityError, InvalidError, NotFoundError
from paceline.platform.digest import digest_of
from paceline_trainer.checkpoints.checkpoint import Checkpoints
from paceline_trainer.checkpoints.folders import checkpoints_of
from paceline_trainer.checkpoints.format import file_of
from paceline_trainer.export.__main__ import main
from paceline_trainer.export.curves import MAX_POINTS, draw, thinned
from paceline_trainer.export.folder import export
from paceline_trainer.export.published import published
from paceline_trainer.export.request import ExportRequest
from paceline_trainer.ranks.distributed import RankGroup
from paceline_trainer.step.loading import open_policy
from paceline_trainer.step.model import PolicyModel, shard
from paceline_trainer.step.optimizer import Optimizer

LORA = LoraSpec(rank=4, alpha=8.0)
IDS = torch.tensor([[1, 7, 3, 9, 2, 11]])


class Job:
    """A job with a checkpoint of random weights, and the record that the ledger has of it."""

    def __init__(
        self, folder: Path, model: Path, group: RankGroup, lora: LoraSpec | None = None
    ) -> None:
        self.folder = folder
        self.model = folder / "model"
        shutil.copytree(model, self.model)
        (self.model / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
        (self.model / "chat_template.jinja").write_text("{{ messages }}")
        self.policy: PolicyModel = open_policy(str(self.model), lora=lora)
        shard(self.policy, group, dtype="float32")
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in self.policy.trained():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        optimizer = Optimizer(self.policy, OptimizerSpec(), total_steps=10)
        place = checkpoints_of(str(folder), "j1")
        checkpoints = Checkpoints(place, group=group, keep=2, incarnation=3)
        digest = checkpoints.write(checkpoints.stage(20, self.policy, optimizer)).digest
        names = ("config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json")
        self.record: dict[str, Any] = {
            "status": {
                "job_id": "j1",
                "name": "arithmetic",
                "tenant": "default",
                "state": "succeeded",
                "checkpoints": [{"step": 20, "digest": digest, "value": 0.5, "best": True}],
            },
            "spec": {
                "name": "arithmetic",
                "model": {"path": str(self.model), "dtype": "float32"},
                "tasks": {"environment": "arithmetic"},
                "reward": [{"kind": "exact"}],
                "trainer": {"lora": lora.model_dump() if lora else None},
            },
            "artifacts": {n: digest_of((self.model / n).read_bytes()) for n in names},
            "rows": [
                {"step": 10, "kind": "train", "reward_mean": 0.25},
                {
                    "step": 20,
                    "kind": "eval",
                    "version": 4,
                    "reward": 0.5,
                    "measured": 9,
                    "complete": True,
                },
            ],
        }

    def request(self, **changes: Any) -> ExportRequest:
        fields: dict[str, Any] = {
            **self.record,
            "which": "best",
            "base": str(self.folder),
            "run_dir": str(self.folder),
            "output": str(self.folder / "out"),
        }
        return ExportRequest.model_validate(fields | changes)

    @torch.no_grad()
    def logits(self) -> Tensor:
        inner: Any = self.policy.inner
        inner.set_attn_implementation("eager")
        return inner(IDS, use_cache=False).logits


@torch.no_grad()
def logits_of(model: Any) -> Tensor:
    return model.eval()(IDS).logits


@pytest.mark.parametrize("size", ["5GB", "20KB"])
def test_transformers_loads_the_whole_model(
    llama: Path, group: RankGroup, tmp_path: Path, size: str
) -> None:
    job = Job(tmp_path, llama, group)
    folder = export(job.request(max_shard_size=size))
    names = {path.name for path in folder.iterdir()}
    assert ("model.safetensors.index.json" in names) == (size == "20KB")
    assert {"chat_template.jinja", "generation_config.json", "tokenizer.json"} <= names
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert torch.allclose(logits_of(loaded), job.logits(), atol=1e-5)
    # It is a model that a job can begin with.
    policy = open_policy(str(folder))
    policy.load(policy.parameters(), 0, 1)
    own, again = (dict(each.inner.named_parameters()) for each in (job.policy, policy))
    assert all(torch.equal(own[name], again[name]) for name in own)
    card = (folder / "README.md").read_text()
    assert str(tmp_path) not in card
    assert "| base model | `.../model` |" in card
    assert "| weight version | 4 |" in card
    assert "| eval | 20 | 0.5000 | 9 | this model |" in card
    assert "| incarnation of the trainer | 3 |" in card
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("lora", [None, LORA])
def test_no_code_of_the_base_model_runs(
    llama: Path,
    group: RankGroup,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lora: LoraSpec | None,
) -> None:
    """Although transformers would ask, and whoever exports might answer yes."""
    job = Job(tmp_path, llama, group, lora)
    names = {"AutoConfig": "strangers.Config", "AutoModelForCausalLM": "strangers.Model"}
    config = json.loads((job.model / "config.json").read_text())
    config |= {"model_type": "strangers", "auto_map": names}
    (job.model / "config.json").write_text(json.dumps(config))
    job.record["artifacts"]["config.json"] = digest_of(json.dumps(config).encode())
    code = f"import pathlib\npathlib.Path({str(tmp_path / 'deed')!r}).touch()\n"
    (job.model / "strangers.py").write_text(code)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 10))
    with pytest.raises(ConfigError, match=r"^model\.path: cannot read"):
        export(job.request())
    assert not (tmp_path / "deed").exists()


def test_engine_precision(llama: Path, group: RankGroup, tmp_path: Path) -> None:
    job = Job(tmp_path, llama, group)
    folder = export(job.request(dtype="bfloat16"))
    found = load_file(folder / "model.safetensors")
    assert {value.dtype for value in found.values()} == {torch.bfloat16}
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


def test_adapters_merged_and_alone(llama: Path, group: RankGroup, tmp_path: Path) -> None:
    from peft import PeftModel

    job = Job(tmp_path, llama, group, LORA)
    expected = job.logits()
    merged = export(job.request())
    loaded: Any = AutoModelForCausalLM.from_pretrained(merged, dtype="auto")
    assert torch.allclose(logits_of(loaded), expected, atol=1e-4)
    alone = export(job.request(adapter=True, output=str(tmp_path / "adapter")))
    assert not (alone / "model.safetensors").exists()
    base = AutoModelForCausalLM.from_pretrained(llama, dtype="auto")
    assert not torch.allclose(logits_of(base), expected, atol=1e-2)
    assert torch.allclose(
        logits_of(PeftModel.from_pretrained(base, str(alone))), expected, atol=1e-4
    )


def test_nothing_is_written_of_what_is_damaged(
    llama: Path, group: RankGroup, tmp_path: Path
) -> None:
    job = Job(tmp_path, llama, group)
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"which": 7}, NotFoundError, "no checkpoint of step 7; there are: 20"),
        ({"adapter": True}, InvalidError, "--adapter: the job has no trainer.lora"),
        ({"output": str(job.model)}, InvalidError, "exists and is not an empty folder"),
    ]
    for changes, kind, message in cases:
        with pytest.raises(kind, match=message):
            export(job.request(**changes))
    (job.model / "tokenizer.json").write_text("{}")
    with pytest.raises(IntegrityError, match=r"tokenizer\.json has changed since"):
        export(job.request())
    weights = Path(checkpoints_of(str(tmp_path), "j1"), "step-000020.3", file_of(0))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(IntegrityError, match="not as it was written"):
        export(job.request())
    assert {path.name for path in tmp_path.iterdir()} <= {"model", "jobs", "cache"}


def test_a_checkpoint_of_another_model_is_refused(
    llama: Path, group: RankGroup, tmp_path: Path
) -> None:
    job = Job(tmp_path, llama, group)
    config = json.loads((job.model / "config.json").read_text()) | {"num_hidden_layers": 3}
    other = tmp_path / "other"
    shutil.copytree(job.model, other)
    (other / "config.json").write_text(json.dumps(config))
    job.record["artifacts"]["config.json"] = digest_of((other / "config.json").read_bytes())
    with pytest.raises(
        IntegrityError, match=r"has no model\.layers\.2\..*: it is of another model"
    ):
        export(job.request(base_model=str(other)))


def test_a_card_can_be_published() -> None:
    options = {"template": "/no_think {q}", "api_key": "sk-1", "path": "/data/rows.jsonl"}
    options |= {"files": ["s3://me:pw@rows/a?X-Amz-Signature=1", "~/b.jsonl"], "size": 3}
    shown = published(
        {
            "name": "a",
            "notify": {"webhook": "https://hooks.example.com/services/T0/secret"},
            "model": {"path": "file:///home/ada/models/tiny"},
            "tasks": {"options": options, "source": None},
        }
    )
    options |= {"api_key": "(removed)", "path": ".../rows.jsonl"}
    options |= {"files": ["(removed)", ".../b.jsonl"]}
    assert shown == {
        "name": "a",
        "model": {"path": ".../tiny"},
        "tasks": {"options": options, "source": None},
    }
    assert published({"path": "s3://rows/a?X-Amz-Signature=1"}) == {"path": "s3://rows/a"}
    assert published({"path": "org/model"}) == {"path": "org/model"}


def test_a_folder_that_cannot_be_written_is_told_in_a_line(
    llama: Path,
    group: RankGroup,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = Job(tmp_path, llama, group)
    (tmp_path / "file").touch()

    def told(output: Path) -> str:
        request = job.request(output=str(output)).model_dump_json()
        monkeypatch.setattr("sys.stdin", io.StringIO(request))
        assert main() == 2
        return capsys.readouterr().err

    error = told(tmp_path / "file" / "out")
    assert error == f"paceline: export failed: [Errno 17] File exists: '{tmp_path}/file'\n"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # as a disk that is full
    try:
        assert "export failed: " in told(tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "out").exists()


def test_curves_are_bounded() -> None:
    points = [(float(step), 0.5) for step in range(10_000)]
    assert len(thinned(points)) <= MAX_POINTS + 1
    assert thinned(points)[-1] == points[-1]
    text = draw({"training <b>": points, "none": []}, title="a & b")
    assert text.count("<polyline") == 1
    assert "training &lt;b&gt;" in text
    assert "a &amp; b" in text
    assert draw({}, title="").endswith("</svg>\n")
