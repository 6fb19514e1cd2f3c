"""Fixtures that render the chart with helm."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.platform.files import locked

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "paceline"
RELEASE, NAMESPACE = "rel", "training"
# Values that leave each other alone, in one rendering for the tests of all of them.
ALTERED = (
    "controller.scaling.idle_s=0",
    "defaults.nodeSelector.disk=ssd",
    "rollout.nodeSelector.gpu=any",
    "rollout.pools.big.nodeSelector.gpu=h100",
    "rollout.pools.far.graceSeconds=9",
    "rollout.pools.far.settings.site=there",
    "rollout.settings.logs.level=DEBUG",
    "rollout.settings.site=here",
    "rollout.weightsMbitPerSecond=1500",
    "services.environment.strategy.type=Recreate",
    "services.gateway.settings.tls.require_client=true",
    "services.reward.nodeSelector.disk=none",
    "services.reward.settings.tls.require_client=false",
    "services.tracking.replicas=1",
    "tokenizers.timeout_s=7",
    "trainer.extraEnv[0].name=HOME",
    "trainer.extraEnv[0].value=/home/me",
    "trainer.graceSeconds=300",
    "trainer.weightsMbitPerSecond=400",
)
FETCH_S, HELM_S = 900.0, 240.0

Object = dict[str, Any]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def chart() -> Path:
    return CHART


@pytest.fixture(scope="session")
def tools() -> dict[str, str]:
    """Paths of helm3, helm4 and kubectl; downloaded once, by one test process at a time."""
    command = [sys.executable, str(ROOT / "deploy" / "helm" / "tools.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_S)
    assert done.returncode == 0, f"helm cannot be fetched:\n{done.stdout}{done.stderr}"
    return json.loads(done.stdout)


@pytest.fixture(scope="session")
def helm(tools: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run helm, by name of the tool, isolated from the user's own settings."""
    home = tmp_path_factory.mktemp("helm")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HELM_", "KUBE"))}
    clean |= {"HOME": str(home), "HELM_CACHE_HOME": str(home), "HELM_CONFIG_HOME": str(home)}

    def run(tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [tools[tool], *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=HELM_S, env=clean)

    return run


@pytest.fixture(scope="session")
def render(helm: Run, shared_folder: Path) -> Callable[..., list[Object]]:
    """Render the chart with a values file of `ci/` (`feature`) and `--set` arguments.

    Each rendering is made once for all processes of a run.
    """
    folder = shared_folder / "renders"
    folder.mkdir(exist_ok=True)

    def rendered(feature: str = "default", *sets: str, tool: str = "helm4") -> list[Object]:
        values = str(CHART / "ci" / f"{feature}-values.yaml")
        arguments = ["template", RELEASE, str(CHART), "-n", NAMESPACE, "-f", values]
        for one in sets:
            arguments += ["--set", one]
        key = "\0".join([tool, *arguments]).encode()
        path = folder / f"{hashlib.sha256(key).hexdigest()}.json"
        with locked(path.with_suffix(".lock")):
            if not path.exists():
                done = helm(tool, *arguments)
                assert done.returncode == 0, f"{feature} {sets}: {done.stderr}"
                documents = yaml.load_all(done.stdout, yaml.CSafeLoader)
                part = path.with_suffix(".part")
                part.write_text(json.dumps([document for document in documents if document]))
                part.rename(path)
        return json.loads(path.read_text())

    return rendered


@pytest.fixture(scope="session")
def altered() -> tuple[str, ...]:
    """`--set` arguments that change one value of each part."""
    return ALTERED


@pytest.fixture(scope="session")
def pods() -> Callable[[list[Object]], dict[str, Object]]:
    """Every pod template of a rendering, by kind and name of its object."""
    return pod_templates


def pod_templates(objects: list[Object]) -> dict[str, Object]:
    found: dict[str, Object] = {}
    for one in objects:
        kind, name, spec = one["kind"], one["metadata"]["name"], one.get("spec", {})
        if kind in {"Deployment", "StatefulSet", "Job"}:
            found[f"{kind}/{name}"] = spec["template"]
        elif kind == "CronJob":
            found[f"{kind}/{name}"] = spec["jobTemplate"]["spec"]["template"]
        elif kind == "ConfigMap" and name.endswith("-templates"):
            for key, text in one["data"].items():
                found[f"template/{key}"] = yaml.load(text, yaml.CSafeLoader)
    return found
