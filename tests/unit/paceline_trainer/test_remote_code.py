"""No code of a model folder runs, wherever transformers is asked for a model."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline_trainer.step.loading import load_policy

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


def test_a_model_with_code_of_its_own_is_refused_and_runs_none(tmp_path: Path) -> None:
    canary = tmp_path / "ran"
    folder = tmp_path / "model"
    folder.mkdir()
    code = f"open({str(canary)!r}, 'w').close()\n"
    (folder / "configuration_own.py").write_text(code)
    (folder / "modeling_own.py").write_text(code)
    auto_map = {"AutoConfig": "configuration_own.Own", "AutoModelForCausalLM": "modeling_own.Own"}
    config = {"model_type": "own", "architectures": ["Own"], "auto_map": auto_map}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="contains custom code"):
        load_policy(str(folder))
    assert not canary.exists()
