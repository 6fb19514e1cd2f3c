"""Store, experience and gateway as processes."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.config.service import ServiceSettings
from paceline.enums import JobState, WorkerKind
from paceline.front.local.processes import Processes
from paceline.platform import wire
from paceline.platform.server.settings_file import write_settings
from paceline.platform.transport.metadata_channel import Metadata
from paceline.platform.transport.service_keys import issue
from paceline.types import JobStatus
from paceline.v1 import experience_pb2, jobs_pb2
from paceline.v1.experience_pb2_grpc import ExperienceStub
from paceline.v1.jobs_pb2_grpc import JobsStub
from paceline_harness.callers.service_keys import metadata_of
from paceline_harness.controlled_cluster.objects import wait_until
from paceline_harness.patience import PATIENCE_S

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
