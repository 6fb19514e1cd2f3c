"""Models that bring code, or name modules, run none of it; who submits a job chooses the model."""

from __future__ import annotations

import ast
import io
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from paceline.config.sections.lora import LoraSpec
from paceline.errors import ConfigError, InvalidError, PacelineError
from paceline_rollout.engines.sglang.layout import Layout
from paceline_rollout.engines.torch.model import TorchModel
from paceline_trainer.step.loading import open_policy
from paceline_trainer.step.lora import add_adapters

CODE = """
import pathlib
from transformers import LlamaConfig, LlamaForCausalLM
pathlib.Path({path!r}).touch()
class Config(LlamaConfig):
    model_type = "strangers"
class Model(LlamaForCausalLM):
    config_class = Config
"""
MAP = {
    "AutoConfig": "strangers.Config",
    "AutoModel": "strangers.Model",
    "AutoModelForCausalLM": "strangers.Model",
    "AutoTokenizer": ["strangers.Model", None],
}
Load = Callable[[Path], Any]


def by_trainer(folder: Path) -> None:
    open_policy(str(folder))


def by_engine(folder: Path) -> None:
    TorchModel(model_dir=folder, dtype="float32", max_context=32, device="cpu")


def by_layout(folder: Path) -> None:
    Layout(folder)


LOADS = [by_trainer, by_engine, by_layout]
ROOT = Path(__file__).resolve().parents[3]
LOADERS = {"from_pretrained", "from_config"}


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Each call by which shipped code has transformers load something, with its place."""
    for path in [*(ROOT / "services").rglob("*.py"), *(ROOT / "shared").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr in LOADERS:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def test_every_load_refuses_remote_code() -> None:
    places = list(calls())
    assert len(places) > 5
    for place, call in places:
        values = [keyword.value for keyword in call.keywords if keyword.arg == "trust_remote_code"]
        assert [ast.unparse(value) for value in values] == ["False"], place


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose folder has code, in a process whose stdin says yes to every question."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "strangers.py").write_text(CODE.format(path=str(tmp_path / "deed")))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 10))
    return folder


def write_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "strangers", "auto_map": MAP},
        {"model_type": "llama", "auto_map": MAP},  # one that transformers knows
        {"model_type": "t5", "auto_map": MAP},  # and one that it knows, but as no causal model
        {
            "model_type": "strangers",
            "auto_map": {"AutoConfig": "strangers/other--strangers.Config"},
        },
        {"model_type": "strangers", "auto_map": MAP, "trust_remote_code": True},
        {"model_type": "llama", "architectures": ["strangers.Model"], "trust_remote_code": True},
        {"model_type": "llama", "custom_generate": "strangers", "auto_map": {"Auto": "os.system"}},
        {"model_type": "llama", "hidden_act": "strangers.Model"},
        {"model_type": "llama", "attn_implementation": "strangers/kernels"},
        {"model_type": "llama", "dtype": "strangers.Model"},
    ],
)
def test_no_code_of_a_model_runs(load: Load, changes: dict[str, Any], model: Path) -> None:
    write_config(model, **changes)
    with suppress(PacelineError, ValueError, KeyError, AttributeError, ImportError):
        load(model)
    assert not (model.parent / "deed").exists()


def test_a_model_with_code_of_its_own_is_refused_as_such(model: Path) -> None:
    write_config(model, model_type="strangers", auto_map=MAP)
    with pytest.raises(InvalidError, match="contains custom code"):
        open_policy(str(model))
    assert not (model.parent / "deed").exists()


@pytest.mark.parametrize(
    "adapter",
    [
        {"peft_type": "LORA", "megatron_core": "strangers", "megatron_config": {"a": 1}},
        {"peft_type": "LORA", "auto_mapping": {"parent_library": "strangers"}},
        {"peft_type": "PROMPT_TUNING", "tokenizer_kwargs": {"trust_remote_code": True}},
        {"peft_type": "LORA", "base_model_name_or_path": "strangers/other"},
    ],
)
def test_peft_reads_no_adapter_of_a_model(adapter: dict[str, Any], model: Path) -> None:
    """Converted weights are loaded by transformers, which would load an adapter beside them."""
    tensors = load_file(model / "model.safetensors")
    renamed = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(renamed, model / "model.safetensors", {"format": "pt"})
    open_policy(str(model))
    text = json.dumps({"target_modules": ["q_proj"], "r": 1} | adapter)
    (model / "adapter_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"has an adapter_config\.json"):
        open_policy(str(model))
    assert not (model.parent / "deed").exists()


@pytest.mark.parametrize("name", [".*", "(a+)+$", "q_proj|v_proj", "strangers:Model", "os.system"])
def test_names_of_adapted_layers_are_no_patterns(name: str, tiny_model: Path) -> None:
    policy = open_policy(str(tiny_model))
    with pytest.raises(ConfigError, match=r"trainer\.lora\.target_modules"):
        add_adapters(policy.inner, LoraSpec(target_modules=(name,)))
