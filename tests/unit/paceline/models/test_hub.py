"""Models of the hub, from a server that speaks its API; the library reads its settings at import,
so every case is a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline_harness.models.folders import NO_TENSORS
from paceline_harness.models.hub import FakeHub, serving_hub
from paceline_harness.patience import PATIENCE_S

TOKEN = "hf_secret_of_these_tests"
FILES = {
    "config.json": b'{"vocab_size": 4}',
    "tokenizer.json": b"{}",
    "model.safetensors": NO_TENSORS,
    "modeling.py": b"raise SystemExit",
    "onnx/config.json": b"{}",
}
# Each call is `find` or `folder` with a model; the answers are results or errors.
CHILD = """
import json, sys
from pathlib import Path
from paceline.config.sections.model import ModelSettings, ModelSpec
from paceline.errors import PacelineError
from paceline.models.resolve import ModelResolver
settings, run_dir, calls = json.loads(sys.argv[1])
resolver = ModelResolver(ModelSettings(**settings), run_dir=Path(run_dir))
for name, fields in calls:
    spec = ModelSpec(**fields)
    try:
        if name == "find":
            found = resolver.find(spec, ("config.json", "tokenizer.json"), max_bytes=1000)
            files = {k: v.decode() for k, v in found.files.items()}
            print(json.dumps({"revision": found.spec.revision, "files": files}))
        else:
            arrived = []
            folder = resolver.folder(spec, arrived=lambda *so_far: arrived.append(so_far))
            names = sorted(path.name for path in folder.iterdir())
            most = max(arrived, default=(0, 0))
            print(json.dumps({"folder": str(folder), "names": names, "arrived": most}))
    except PacelineError as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error.message}"}))
"""


class Machine:
    """A machine with caches of its own."""

    def __init__(self, hub: FakeHub, folder: Path) -> None:
        self.hub, self.folder = hub, folder

    def run(self, *calls: tuple[str, dict[str, str]], **env: str) -> list[dict[str, Any]]:
        settings = json.loads(env.pop("settings", "{}"))
        result = subprocess.run(
            [sys.executable, "-c", CHILD, json.dumps([settings, str(self.folder), calls])],
            env=os.environ
            | {"HF_ENDPOINT": self.hub.url, "HF_HOME": str(self.folder / "hf"), "HF_TOKEN": ""}
            | env,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        assert TOKEN not in result.stdout + result.stderr
        return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with serving_hub() as found:
        yield found


@pytest.fixture
def machine(hub: FakeHub, tmp_path: Path) -> Machine:
    return Machine(hub, tmp_path / "one")


def test_a_branch_is_pinned_and_every_machine_gets_that_commit(
    hub: FakeHub, machine: Machine, tmp_path: Path
) -> None:
    repo = hub.repo("org/tiny")
    first = repo.push(FILES)
    [found] = machine.run(("find", {"path": "org/tiny"}))
    assert found == {
        "revision": first,
        "files": {name: FILES[name].decode() for name in ("config.json", "tokenizer.json")},
    }
    assert hub.downloads("model.safetensors") == 0
    second = repo.push({**FILES, "config.json": b'{"vocab_size": 5}'})
    pinned = {"path": "org/tiny", "revision": first}
    for each in (machine, Machine(hub, tmp_path / "two")):
        [got] = each.run(("folder", pinned))
        assert got["names"] == ["config.json", "model.safetensors", "tokenizer.json"]
        num_bytes = sum(len(FILES[name]) for name in got["names"])
        assert got["arrived"] == [num_bytes, num_bytes]
        assert Path(got["folder"], "config.json").read_bytes() == FILES["config.json"]
    [moved] = machine.run(("find", {"path": "org/tiny"}))
    assert moved["revision"] == second
    before = hub.downloads("model.safetensors")
    assert machine.run(("folder", pinned))[0]["names"] == got["names"]
    assert hub.downloads("model.safetensors") == before == 2


def test_offline_the_cache_is_enough(hub: FakeHub, machine: Machine) -> None:
    commit = hub.repo("org/tiny").push(FILES)
    main = {"path": "org/tiny"}
    machine.run(("folder", {**main, "revision": commit}))
    asked = len(hub.requests)
    found, other = machine.run(
        ("folder", {**main, "revision": commit}),
        ("find", {"path": "org/other"}),
        HF_HUB_OFFLINE="1",
    )
    assert "model.safetensors" in found["names"]
    assert other["error"].startswith("UnavailableError: model.path: org/other is not in the cache")
    assert "HF_HUB_OFFLINE is set" in other["error"]
    assert len(hub.requests) == asked


def test_what_cannot_be_had_is_named(hub: FakeHub, machine: Machine) -> None:
    hub.repo("org/tiny").push(FILES)
    hub.repo("org/gated", gated=True, token=TOKEN).push(FILES)
    hub.repo("org/private", token=TOKEN).push(FILES)
    pickle = {name: data for name, data in FILES.items() if name != "model.safetensors"}
    hub.repo("org/pickle").push({**pickle, "pytorch_model.bin": b"x"})
    index = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
    split = {**pickle, "model.safetensors.index.json": index.encode()}
    hub.repo("org/split").push({**split, "model-1.safetensors": NO_TENSORS})
    hub.repo("org/large").push({**FILES, "tokenizer.json": b" " * 2000})
    cases = {
        "org/none": "ConfigError: model.path: org/none is neither a folder on the gateway's",
        "org/private": "ConfigError: model.path: org/private is neither a folder",
        "org/gated": "ConfigError: model.path: org/gated is gated: accept its terms at",
        "org/pickle": "has its weights only as pytorch_model.bin, a pickle",
        "org/split": "does not have model-2.safetensors, of the 2 files that",
        "org/large": "the small model files have 2017 bytes; at most 1000 are allowed",
    }
    *answers, revision = machine.run(
        *(("find", {"path": path}) for path in cases),
        ("find", {"path": "org/tiny", "revision": "v9"}),
    )
    for (path, expected), answer in zip(cases.items(), answers, strict=True):
        assert expected in answer["error"], path
    assert "model.revision: org/tiny on" in revision["error"]
    assert "has no revision 'v9'" in revision["error"]
    private, gated = machine.run(
        ("find", {"path": "org/private"}), ("find", {"path": "org/gated"}), HF_TOKEN=TOKEN
    )
    assert set(private["files"]) == set(gated["files"]) == {"config.json", "tokenizer.json"}


def test_an_unreachable_hub_is_named(hub: FakeHub, machine: Machine) -> None:
    call = ("find", {"path": "org/tiny"})
    [answer] = machine.run(call, HF_ENDPOINT="http://127.0.0.1:9", HF_TOKEN=TOKEN)
    assert answer["error"].startswith("UnavailableError: model.path: org/tiny is no folder")
    assert "http://127.0.0.1:9 cannot be reached" in answer["error"]
    [refused] = machine.run(call, settings='{"hub": false}')
    assert (
        refused["error"]
        == "ConfigError: model.path: this installation takes no models from the hub"
    )


def test_damaged_weights_are_found_before_they_are_used(hub: FakeHub, machine: Machine) -> None:
    commit = hub.repo("org/tiny").push({**FILES, "model.safetensors": NO_TENSORS + b"0" * 64})
    call = ("folder", {"path": "org/tiny", "revision": commit})
    hub.damaged.add("model.safetensors")
    [answer] = machine.run(call)
    assert answer["error"].startswith("IntegrityError: model.path: ")
    assert "is damaged: SHA-256" in answer["error"]


def test_data_are_shown_with_the_tokenizer_of_the_hub(
    hub: FakeHub, machine: Machine, tiny_model: Path, tmp_path: Path
) -> None:
    commit = hub.repo("org/tiny").push(
        {each.name: each.read_bytes() for each in tiny_model.iterdir() if each.is_file()}
    )
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
    job: dict[str, Any] = {
        "name": "hub",
        "model": {"path": "org/tiny", "revision": commit},
        "data": {"path": str(tmp_path / "rows.jsonl")},
        "tasks": {"environment": "dataset", "options": {"split": "all"}},
        "eval": None,
        "reward": [{"kind": "exact"}],
        "sampling": {"max_tokens": 4, "max_context": 16},
    }
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    done = subprocess.run(
        [sys.executable, "-m", "paceline.front.cli", "data", "inspect", str(tmp_path / "job.yaml")],
        env=os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": ""},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "1+1=" in done.stdout
    assert hub.downloads("model.safetensors") == 0
