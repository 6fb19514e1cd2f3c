"""Checks of a cluster, with the kubectl and the kubeconfig of whoever asks."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.front.cli.doctor.finding import Finding, broken, note, ok

CRD = "trainingjobs.paceline.dev"
CHART = "deploy/helm/paceline"
_COMMAND_S = 20.0
# Kinds that `helm install` of the chart creates, so whoever installs it needs the permission.
_CREATED = (
    *("deployments.apps", "services", "secrets", "configmaps", "serviceaccounts"),
    *("jobs.batch", "persistentvolumeclaims"),
    *("roles.rbac.authorization.k8s.io", "rolebindings.rbac.authorization.k8s.io"),
)
_OLDEST = (1, 27)


@dataclass(frozen=True, slots=True)
class Kubectl:
    """kubectl in one namespace."""

    namespace: str = ""
    command: str = "kubectl"

    def run(self, *arguments: str) -> tuple[int, str]:
        """The exit code, and what it printed: its output, or else its complaint."""
        where = ["--namespace", self.namespace] if self.namespace else []
        try:
            done = subprocess.run(
                [self.command, *where, *arguments],
                capture_output=True,
                text=True,
                timeout=_COMMAND_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return 124, f"no answer within {_COMMAND_S:g} s"
        return done.returncode, done.stdout if done.returncode == 0 else _last(done.stderr)

    def get(self, *arguments: str) -> tuple[Any, str]:
        """An object, or None and why there is none."""
        code, text = self.run("get", *arguments, "--output", "json")
        return (json.loads(text), "") if code == 0 else (None, text)


def cluster(namespace: str, *, command: str = "kubectl") -> Iterator[Finding]:
    """Version, nodes, permissions, the definition of TrainingJob, and the installation."""
    if shutil.which(command) is None:
        yield broken("kubectl", "is not installed; see https://kubernetes.io/docs/tasks/tools")
        return
    kubectl = Kubectl(namespace, command)
    code, text = kubectl.run("version", "--output", "json")
    server = json.loads(text).get("serverVersion") if code == 0 else None
    if not server:
        problem = text if code else "no server answers"
        yield broken("cluster", problem, "kubectl config get-contexts")
        return
    yield _version(server)
    yield from _nodes(kubectl)
    yield _permissions(kubectl)
    yield _definition(kubectl)
    yield _installed(kubectl)


def _version(server: dict[str, str]) -> Finding:
    text = f"Kubernetes {server.get('gitVersion', '?')}"
    digits = [
        "".join(char for char in server.get(name, "") if char.isdecimal())
        for name in ("major", "minor")
    ]
    if all(digits) and tuple(map(int, digits)) < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        return broken("cluster", f"{text} is older than {oldest}; upgrade the cluster")
    return ok("cluster", text)


def _nodes(kubectl: Kubectl) -> Iterator[Finding]:
    """Nodes that take pods, with their GPUs; a user of a namespace may not see them."""
    nodes, why = kubectl.get("nodes")
    if nodes is None:
        yield note("nodes", f"cannot be listed: {why}")
        return
    ready = [node for node in nodes["items"] if _is_ready(node)]
    gpus = sum(int(_allocatable(node, "nvidia.com/gpu")) for node in ready)
    text = f"{len(ready)} of {len(nodes['items'])} are ready, with {gpus} GPUs"
    if not ready:
        yield broken("nodes", text, "kubectl describe nodes")
    elif not gpus:
        yield note("nodes", f"{text}; GPUs need the device plug-in of their vendor")
    else:
        yield ok("nodes", text)


def _permissions(kubectl: Kubectl) -> Finding:
    refused = [what for what in _CREATED if kubectl.run("auth", "can-i", "create", what)[0] != 0]
    if refused:
        code, user = kubectl.run(
            "auth", "whoami", "--output", "jsonpath={.status.userInfo.username}"
        )
        binding = "kubectl create rolebinding paceline-installer --clusterrole admin --user"
        text = f"you may not create {', '.join(refused)}; an administrator can allow it"
        return note("permissions", text, f"{binding} {shlex.quote(user)}" if code == 0 else "")
    return ok("permissions", "you may install the chart here")


def _definition(kubectl: Kubectl) -> Finding:
    definition, why = kubectl.get("customresourcedefinition", CRD)
    mend = f"helm upgrade --install paceline {CHART}"
    if definition is None:
        return note("TrainingJob", f"is not defined: {why}", mend)
    served = [version["name"] for version in definition["spec"]["versions"] if version["served"]]
    return ok("TrainingJob", f"is defined: {', '.join(served)}")


def _installed(kubectl: Kubectl) -> Finding:
    """The deployments of the chart, and whether their pods are there."""
    deployments, why = kubectl.get("deployments", "--selector", "app.kubernetes.io/name=paceline")
    if deployments is None:
        return note("installation", f"deployments cannot be listed: {why}")
    items: list[Any] = deployments["items"]
    if not items:
        mend = f"helm install paceline {CHART}"
        return note("installation", "none in this namespace", mend)
    lacking = [_name(deployment) for deployment in items if _lacks(deployment)]
    if lacking:
        mend = f"kubectl describe deployment {lacking[0]}"
        return broken("installation", f"{', '.join(lacking)} have too few pods", mend)
    return ok("installation", f"{len(items)} deployments, all of their pods are ready")


def _is_ready(node: Any) -> bool:
    conditions: Sequence[Any] = node.get("status", {}).get("conditions", ())
    ready = any(
        condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions
    )
    return ready and not node.get("spec", {}).get("unschedulable")


def _allocatable(node: Any, name: str) -> str:
    return node.get("status", {}).get("allocatable", {}).get(name, "0")


def _lacks(deployment: Any) -> bool:
    wanted = deployment["spec"].get("replicas", 1)
    return deployment.get("status", {}).get("readyReplicas", 0) < wanted


def _name(resource: Any) -> str:
    return str(resource["metadata"]["name"])


def _last(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "it says nothing"
