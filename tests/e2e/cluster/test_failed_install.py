"""An installation that fails in its first hook leaves nothing after `helm uninstall`."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kubernetes_double import Cluster
from paceline_harness.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "deploy" / "helm" / "paceline"
NAMESPACE = "team"
KINDS = (
    *("Pod", "Job", "CronJob", "Secret", "ConfigMap", "ServiceAccount", "Role", "RoleBinding"),
    *("NetworkPolicy", "Deployment", "StatefulSet", "Service", "PersistentVolumeClaim"),
)
MADE_BY_THE_CLUSTER = {"kube-root-ca.crt", "default"}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := Cluster.unavailable_reason():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("cluster")
    with Cluster(folder=folder / "cluster", namespace=NAMESPACE) as made:
        yield made


def left(cluster: Cluster) -> set[str]:
    return {
        f"{kind}/{found['metadata']['name']}"
        for kind in KINDS
        for found in cluster.list(kind)
        if found["metadata"]["name"] not in MADE_BY_THE_CLUSTER
    }


@pytest.mark.parametrize("version", [pytest.param(3, marks=pytest.mark.extended), 4])
def test_nothing_is_left_of_it(cluster: Cluster, tools: dict[str, Path], version: int) -> None:
    """No node accepts the hook's pod, as if its image could not be pulled."""

    def helm(*words: str) -> subprocess.CompletedProcess[str]:
        where = ["--kubeconfig", str(cluster.kubeconfig), "-n", NAMESPACE]
        command = [str(tools[f"helm{version}"]), *words, *where]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)

    nowhere = ["--set", "certificates.pod.nodeSelector.disk=none", "--set", "crds.keep=false"]
    words = ["install", "paceline", str(CHART), *nowhere, "--timeout", "5s", "--create-namespace"]
    failed = helm(*words)
    assert failed.returncode != 0
    assert "Job/paceline-certificates-hook" in left(cluster)
    done = helm("uninstall", "paceline", "--timeout", "120s")
    assert done.returncode == 0, done.stderr
    cluster.until(lambda: not left(cluster), "nothing left", timeout_s=PATIENCE_S)
    # A machine that would take the pod: there is none of it any more that could issue anything.
    selector: Any = "app.kubernetes.io/component=certificates"
    assert not cluster.pods(selector)
