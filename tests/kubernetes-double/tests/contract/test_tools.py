"""Real kubectl and helm 3 and 4, whose paths KUBERNETES_DOUBLE_TOOLS names, or of the path."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from kubernetes_double.patience import PATIENCE_S

Run = Callable[..., str]


@pytest.fixture(scope="session")
def tools() -> dict[str, str]:
    """Paths by name; fails rather than skips where a tool is missing."""
    named: dict[str, str] = json.loads(os.environ.get("KUBERNETES_DOUBLE_TOOLS", "{}"))
    paths = {name: named.get(name) or shutil.which(name) for name in ("kubectl", "helm3", "helm4")}
    missing = [name for name, path in paths.items() if path is None]
    assert not missing, f"not installed: {missing}; name their paths in KUBERNETES_DOUBLE_TOOLS"
    return {name: path for name, path in paths.items() if path}


@pytest.fixture
def run(tools: dict[str, str], kubeconfig: Path, clients: Any, tmp_path: Path) -> Run:
    """Run a tool in the test's namespace; returns its output."""
    homes = {f"HELM_{kind}_HOME": str(tmp_path / kind) for kind in ("CACHE", "CONFIG", "DATA")}
    places = {"KUBECONFIG": str(kubeconfig), "HOME": str(tmp_path), **homes}

    def call(tool: str, *arguments: str, given: str = "") -> str:
        done = subprocess.run(
            [tools[tool], "--namespace", clients.namespace, *arguments],
            input=given,
            env=places,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return call


CHART = {
    "Chart.yaml": "apiVersion: v2\nname: demo\nversion: 1.0.0\n",
    "values.yaml": "replicas: 0\ncolour: red\n",
    "templates/objects.yaml": """
apiVersion: v1
kind: ConfigMap
metadata: {name: "{{ .Release.Name }}"}
data: {colour: "{{ .Values.colour }}"}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: "{{ .Release.Name }}"}
spec:
  replicas: {{ .Values.replicas }}
  selector: {matchLabels: {app: demo}}
  template:
    metadata: {labels: {app: demo}}
    spec: {containers: [{name: main, image: "none:1"}]}
""",
}


@pytest.fixture
def chart(tmp_path: Path) -> str:
    for name, text in CHART.items():
        path = tmp_path / "demo" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(tmp_path / "demo")


@pytest.mark.parametrize("helm", ["helm3", "helm4"])
def test_a_release_comes_changes_and_goes(clients: Any, run: Run, chart: str, helm: str) -> None:
    def colour() -> str:
        return clients.core.read_namespaced_config_map("rel", clients.namespace).data["colour"]

    run(helm, "install", "rel", chart)
    assert colour() == "red"
    (release,) = json.loads(run(helm, "list", "--output", "json"))
    assert (release["name"], release["status"], release["revision"]) == ("rel", "deployed", "1")
    run(helm, "upgrade", "rel", chart, "--set", "colour=blue")
    assert colour() == "blue"
    run(helm, "rollback", "rel", "1")
    assert colour() == "red"
    run(helm, "uninstall", "rel", "--wait", "--timeout", "120s")
    assert json.loads(run(helm, "list", "--output", "json")) == []
    left = clients.core.list_namespaced_config_map(clients.namespace).items
    assert {one.metadata.name for one in left} <= {"kube-root-ca.crt"}
    assert clients.core.list_namespaced_secret(clients.namespace).items == []


def test_kubectl_applies_gets_waits_and_deletes(run: Run, deployment: Any) -> None:
    body = deployment("one")
    run("kubectl", "apply", "--server-side", "-f", "-", given=yaml.safe_dump(body))
    body["spec"]["paused"] = True
    settings = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "plain"}}
    for data in ({"a": "1", "b": "2"}, {"b": "2"}):
        given = yaml.safe_dump({**settings, "data": data})
        run("kubectl", "apply", "-f", "-", given=given)
    shown = json.loads(run("kubectl", "get", "configmap", "plain", "-o", "json"))
    assert shown["data"] == {"b": "2"}
    assert "one" in run("kubectl", "get", "deployments")
    run("kubectl", "scale", "deployment/one", "--replicas=0")
    run(
        "kubectl",
        "wait",
        "deployment/one",
        "--for=jsonpath={.spec.replicas}=0",
        f"--timeout={PATIENCE_S:.0f}s",
    )
    run("kubectl", "label", "deployment/one", "colour=red")
    assert run("kubectl", "get", "deploy", "-l", "colour=red", "-o", "name").split() == [
        "deployment.apps/one"
    ]
    run(
        "kubectl",
        "delete",
        "deployment",
        "one",
        "--cascade=foreground",
        f"--timeout={PATIENCE_S:.0f}s",
    )
    assert run("kubectl", "get", "deploy", "-o", "name") == ""


def test_kubectl_explains_and_answers_for_accounts(clients: Any, run: Run) -> None:
    assert "replicas" in run("kubectl", "explain", "deployment.spec")
    assert run("kubectl", "auth", "can-i", "create", "pods").strip() == "yes"


def test_kubectl_refuses_unknown_fields(run: Run, deployment: Any) -> None:
    body = deployment("one", replica=1)
    with pytest.raises(AssertionError, match=r'unknown field "spec\.replica"'):
        run("kubectl", "create", "-f", "-", given=yaml.safe_dump(body))
