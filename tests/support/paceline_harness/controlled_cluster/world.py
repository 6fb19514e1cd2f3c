"""One installation with its own API server and what the chart gives its controller."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kubernetes_double.api import ApiServer
from paceline.config.service import ServiceSettings
from paceline.enums import WorkerKind
from paceline.front.local.processes import Processes
from paceline.platform.transport.principal import derived_token
from paceline.platform.transport.service_keys import issue
from paceline_harness.controlled_cluster.nodes import Nodes, component, living
from paceline_harness.controlled_cluster.objects import (
    ACCOUNT,
    NAMESPACE,
    RELEASE,
    Cluster,
    wait_until,
)
from paceline_harness.controlled_cluster.relay import Relay
from paceline_harness.controlled_cluster.services import TOKEN, Services, start, wait_serving
from paceline_harness.patience import PATIENCE_S
from paceline_harness.ports import free_port

ROOT = Path(__file__).resolve().parents[4]


CHART = ROOT / "deploy" / "helm" / "paceline"


OWNER = LEASE = "rel-paceline-controller"


POOLS = {"environment": "rel-paceline-environment", "reward": "rel-paceline-reward"}


def pod_template() -> dict[str, Any]:
    container = {"name": "paceline", "image": "paceline/worker:1", "args": ["--set", "x=$(JOB_ID)"]}
    return {"metadata": {"labels": {}}, "spec": {"containers": [container]}}


def rules(*, jobset: bool = False) -> list[dict[str, Any]]:
    """The chart's rules with everything enabled except, by default, JobSets."""
    text = (CHART / "templates" / "controller-rbac.yaml").read_text()
    document = text.split("---")[0]
    if not jobset:
        block = r"\{\{- if .Values.controller.jobset \}\}.*?\{\{- end \}\}"
        document = re.sub(block, "", document, flags=re.DOTALL)
    document = document.replace('{{ include "paceline.fullname" . }}', "rel-paceline")
    document = re.sub(r"^.*\{\{.*\}\}.*$", "", document, flags=re.M)
    return yaml.load(document, yaml.CSafeLoader)["rules"]


@dataclass
class World:
    """One installation with its own API server."""

    folder: Path
    server: ApiServer
    cluster: Cluster
    nodes: Nodes
    services: Services
    relay: Relay
    controllers: Processes
    ports: dict[str, int] = field(default_factory=dict[str, int])

    def start(self, name: str = "ctl-0", **changes: Any) -> None:
        """Start a controller with the rights of the chart's ServiceAccount."""
        kubeconfig = yaml.load(
            self.server.kubeconfig_for(NAMESPACE, ACCOUNT).read_text(), yaml.CSafeLoader
        )
        kubeconfig["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{self.relay.port}"
        path = self.folder / f"{name}-kubeconfig.yaml"
        path.write_text(yaml.safe_dump(kubeconfig))
        more = changes.pop("kubernetes", {})
        kubernetes_options = {
            "kubeconfig": str(path),
            "namespace": NAMESPACE,
            "release": RELEASE,
            "identity": name,
            "owner": OWNER,
            "lease": LEASE,
            # Long enough for a busy machine; tests that wait for its expiry override it.
            "lease_s": 30.0,
            "templates": str(self.folder / "templates"),
            "pools": POOLS,
            "network_policies": True,
            "gateway": self.services.gateway,
            **more,
        }
        options = {"runtime": "kubernetes", "kubernetes": kubernetes_options, **changes}
        self.ports[name] = free_port()
        kind = WorkerKind.CONTROLLER
        settings = ServiceSettings(
            kind=kind,
            worker_id=name,
            port=self.ports[name],
            run_dir=self.folder,
            experience=self.services.experience,
            token=derived_token(TOKEN, "controller"),
            service_keys=issue(self.services.keys, [kind])[kind],
            options=options,
        )
        start(self.controllers, settings)
        wait_serving(self.ports[name], kind, self.services.keys)

    def kill(self, name: str = "ctl-0") -> None:
        self.controllers.kill(name)

    def stop(self, name: str = "ctl-0") -> int | None:
        self.controllers.stop(name, grace_s=PATIENCE_S)
        return self.controllers.exit_code(name)

    def signal(self, name: str, number: int) -> None:
        record = self.controllers.find(name)
        assert record is not None
        os.kill(record.pid, number)

    def log(self, name: str = "ctl-0") -> str:
        return (self.folder / f"{name}.out").read_text(errors="replace")

    def leader(self) -> str:
        lease = self.cluster.get("Lease", LEASE)
        return lease["spec"].get("holderIdentity", "") if lease else ""

    def apply(self, name: str, job: dict[str, Any]) -> None:
        """`kubectl apply` of a TrainingJob."""
        spec = {key: value for key, value in job.items() if key != "name"}
        self.cluster.create("TrainingJob", name, spec=spec)

    def status(self, name: str) -> dict[str, Any]:
        found = self.cluster.get("TrainingJob", name)
        return (found or {}).get("status") or {}

    def change_image(self, *templates: str) -> None:
        """Change the image in pod templates, atomically as in a mounted ConfigMap."""
        for name in templates:
            path = self.folder / "templates" / f"{name}.yaml"
            template = yaml.load(path.read_text(), yaml.CSafeLoader)
            template["spec"]["containers"][0]["image"] = "paceline/worker:2"
            fresh = path.with_suffix(".new")
            fresh.write_text(yaml.safe_dump(template))
            fresh.replace(path)

    def install_jobsets(self) -> None:
        """Install a minimal JobSet kind and the rights that the chart grants for it."""
        anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        version = {
            "name": "v1alpha2",
            "served": True,
            "storage": True,
            "subresources": {"status": {}},
            "schema": {"openAPIV3Schema": anything},
        }
        spec = {
            "group": "jobset.x-k8s.io",
            "names": {"kind": "JobSet", "plural": "jobsets", "singular": "jobset"},
            "scope": "Namespaced",
            "versions": [version],
        }
        self.cluster.create("CustomResourceDefinition", "jobsets.jobset.x-k8s.io", spec=spec)
        self.cluster.patch("Role", ACCOUNT, {"rules": rules(jobset=True)})
        self.nodes.jobsets = True

    def made(self) -> list[str]:
        """All existing objects of jobs."""
        ours = "app.kubernetes.io/managed-by=paceline-controller"
        kinds = ["Deployment", "Job", "NetworkPolicy", "Pod", "Secret", "Service"]
        kinds += ["JobSet"] * self.nodes.jobsets
        return [
            f"{kind}/{body['metadata']['name']}"
            for kind in kinds
            for body in self.cluster.list(kind, ours)
        ]

    def workers_of(self, job_id: str) -> list[str]:
        """The names of a job's rollout pods."""
        pods = self.cluster.list("Pod", f"paceline.dev/workload=rollout-{job_id}")
        return sorted(pod["metadata"]["name"] for pod in pods)

    def running(self, job_id: str) -> None:
        """Wait until trainer and rollout workers run, then set the state as the trainer would."""
        wait_until(
            lambda: [
                pod
                for pod in self.cluster.list("Pod", f"paceline.dev/job={job_id}")
                if component(pod) == "trainer" and living(pod)
            ],
            f"no trainer of {job_id}",
        )
        wait_until(lambda: self.services.job(job_id).state == "starting", "not starting")
        self.services.set_state(job_id, "running")


def install(world: World) -> None:
    """Create the chart's objects that the controller uses."""
    cluster = world.cluster
    cluster.create("Namespace", NAMESPACE)
    definition = yaml.load((CHART / "files" / "trainingjob.yaml").read_text(), yaml.CSafeLoader)
    cluster.of("CustomResourceDefinition").create(body=definition)
    cluster.create("ServiceAccount", ACCOUNT)
    cluster.create("Role", ACCOUNT, rules=rules())
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": ACCOUNT}
    subject = {"kind": "ServiceAccount", "name": ACCOUNT, "namespace": NAMESPACE}
    cluster.create("RoleBinding", ACCOUNT, roleRef=reference, subjects=[subject])
    for kind, name in {**POOLS, "controller": OWNER}.items():
        labels = {"app.kubernetes.io/instance": RELEASE, "app.kubernetes.io/component": kind}
        template = pod_template()
        template["metadata"]["labels"] = labels
        replicas = 0 if kind in POOLS else 1
        spec = {"replicas": replicas, "selector": {"matchLabels": labels}, "template": template}
        cluster.create("Deployment", name, metadata={"labels": labels}, spec=spec)
    folder = world.folder / "templates"
    folder.mkdir()
    for name in ("trainer", "rollout-default"):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(pod_template()))
