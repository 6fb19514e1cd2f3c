"""A helm installation in a cluster of processes, for the tests in this folder."""

import base64
import importlib.util
import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from kubernetes_double import Cluster
from paceline.front.client.client import Client
from paceline_harness.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "deploy" / "helm" / "paceline"
NAMESPACE = "team"
MODEL = "/models/arithmetic"
# Decisions within seconds, where a real installation takes minutes.
SCALING = {
    "period_s": 0.5,
    "warmup_s": 1,
    "smooth_s": 3,
    "smooth_steps": 2,
    "scale_up_cooldown_s": 1,
    "scale_down_stabilization_s": 4,
    "idle_s": 3,
    "reward": {},
}
VALUES = {
    "services": {"gateway": {"replicas": 1}, "controller": {"replicas": 2}},
    "store": {"embedded": {"persistence": {"keep": False}}},
    "storage": {"volume": {"keep": False}},
    "crds": {"keep": False},
    # A trainer whose ledger is uninstalled with it waits this long for the ledger.
    "trainer": {"ranksPerPod": 1, "graceSeconds": 10},
    "rollout": {"pools": {"default": {"cost": 2.0}, "spot": {"cost": 1.0, "spot": True}}},
    "controller": {"scaling": SCALING},
}


@dataclass(slots=True)
class Installation:
    """One release in a cluster."""

    cluster: Cluster
    tools: dict[str, Path]
    values: Path
    name: str = "paceline"

    def helm(self, *words: str, version: int = 4) -> str:
        """Run helm; returns its output."""
        return self._run(str(self.tools[f"helm{version}"]), *words)

    def kubectl(self, *words: str) -> str:
        """Run kubectl; returns its output."""
        return self._run(str(self.tools["kubectl"]), *words)

    def install(self, *more: str, version: int = 4) -> str:
        """Install the release and wait until all its pods are ready."""
        words = ["install", self.name, str(CHART), "-f", str(self.values), "--create-namespace"]
        said = self.helm(*words, "--timeout", "300s", *more, version=version)
        self.cluster.until(self._is_up, "all pods ready", timeout_s=PATIENCE_S)
        return said

    def upgrade(self, *more: str, version: int = 4) -> str:
        """Upgrade the release with other values and wait until its pods are replaced."""
        words = ["upgrade", self.name, str(CHART), "-f", str(self.values), "--timeout", "300s"]
        said = self.helm(*words, *more, version=version)
        self.cluster.until(self._is_up, "all pods ready", timeout_s=PATIENCE_S)
        return said

    def events(self) -> list[dict[str, Any]]:
        """The controller's events about jobs."""
        return self.cluster.list("events.k8s.io/v1/Event")

    def client(self) -> Client:
        """An SDK client with the generated token."""
        found: list[str] = []

        def is_there() -> bool:
            found[:] = self.pods("gateway")
            return bool(found)

        self.cluster.until(is_there, "a gateway", timeout_s=PATIENCE_S)
        host, port = self.cluster.address(found[0], 8300)
        url = f"http://{host}:{port}"
        return Client(url, token=self.token(), timeout_s=60.0, outage_s=300.0)

    def token(self) -> str:
        """The token, read as described in helm's notes."""
        return self.secret(f"{self.name}-token", "token")

    def secret(self, name: str, key: str) -> str:
        """A value of a Secret."""
        found = self.cluster.get("Secret", name)
        assert found is not None
        return base64.b64decode(found["data"][key]).decode()

    def pods(self, component: str, job_id: str = "") -> list[str]:
        """Names of the ready pods of a component."""
        selector = f"app.kubernetes.io/component={component}"
        selector += f",paceline.dev/job={job_id}" if job_id else ""
        return [
            pod["metadata"]["name"]
            for pod in self.cluster.pods(selector)
            if "deletionTimestamp" not in pod["metadata"] and is_ready(pod)
        ]

    def _is_up(self) -> bool:
        return all(is_rolled_out(each) for each in self._controllers())

    def _controllers(self) -> list[dict[str, Any]]:
        selector = "app.kubernetes.io/managed-by=Helm"
        found = (self.cluster.list(kind, selector) for kind in ("Deployment", "StatefulSet"))
        return [each for kind in found for each in kind]

    def _run(self, *command: str) -> str:
        where = ["--kubeconfig", str(self.cluster.kubeconfig), "-n", NAMESPACE]
        done = subprocess.run(
            [*command, *where], capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout


def is_rolled_out(workload: dict[str, Any]) -> bool:
    wanted, status = workload["spec"].get("replicas", 1), workload.get("status") or {}
    counts = [status.get(name, 0) for name in ("replicas", "readyReplicas", "updatedReplicas")]
    seen = status.get("observedGeneration") == workload["metadata"]["generation"]
    return seen and counts == [wanted] * 3


def is_ready(pod: dict[str, Any]) -> bool:
    conditions = pod.get("status", {}).get("conditions") or []
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


@pytest.fixture(scope="session")
def tools() -> dict[str, Path]:
    """helm 3, helm 4 and kubectl; fetched once."""
    spec = importlib.util.spec_from_file_location("tools", ROOT / "deploy" / "helm" / "tools.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: dict[str, Path] = module.fetch()
    return found


@pytest.fixture(scope="module")
def installation(
    tmp_path_factory: pytest.TempPathFactory, tools: dict[str, Path], demo_model: Path
) -> Iterator[Installation]:
    """A fresh cluster with Paceline in it."""
    if reason := Cluster.unavailable_reason():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("cluster")
    values = folder / "values.yaml"
    values.write_text(yaml.safe_dump(VALUES))
    files = {str(demo_model): MODEL}
    with Cluster(folder=folder / "cluster", namespace=NAMESPACE, files=files) as cluster:
        made = Installation(cluster, tools, values)
        made.install()
        yield made


@pytest.fixture(scope="session")
def demo_job() -> Callable[..., dict[str, Any]]:
    """The demo's job with smaller batches and evaluations; keyword arguments change sections."""

    def make(**sections: Any) -> dict[str, Any]:
        job = yaml.safe_load((ROOT / "examples" / "arithmetic.yaml").read_text())
        job["model"]["path"] = MODEL
        job["eval"]["tasks"] = 20
        job["experience"]["batch_groups"] = 8
        for name, content in sections.items():
            job[name] = {**job[name], **content} if isinstance(content, dict) else content
        return json.loads(json.dumps(job))

    return make
