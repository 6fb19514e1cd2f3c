"""An RPC with a route, added to a copy of the tree by the steps of CONTRIBUTING ("Add an RPC")."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from paceline_harness.patience import PATIENCE_S
from paceline_harness.source_tree import copied_tree, env_of

pytestmark = pytest.mark.slow

# What is written by hand: the file, the line before which it goes, the text.
EDITS = (
    (
        "protos/paceline/v1/jobs.proto",
        "  // Which worker holds which weights",
        """  rpc EchoJob(EchoJobRequest) returns (EchoJobReply) {
    option idempotency_level = NO_SIDE_EFFECTS;
    option (operation) = {
      summary: "Says the name of a job again and again."
      role: ROLE_READ
      callers: [WORKER_KIND_GATEWAY]
    };
    option (google.api.http) = {get: "/v1/jobs/{job_id}/echo"};
  }
""",
    ),
    (
        "protos/paceline/v1/jobs.proto",
        "message GetJobRequest {",
        """message EchoJobRequest {
  string job_id = 1;
  int32 times = 2 [(input) = {default: 2, max: 5}];
}

message EchoJobReply {
  repeated string words = 1;
}

""",
    ),
    (
        "shared/paceline/front/api/documents.py",
        "class MetricRow(BaseModel):",
        '''class EchoView(BaseModel):
    """What a job has been made to say."""

    message: ClassVar = "EchoJobReply"
    words: list[str]


''',
    ),
    (
        "services/paceline_experience/api/jobs.py",
        "    async def GetJob(",
        '''    async def EchoJob(self, request: pb.EchoJobRequest, context: Any) -> pb.EchoJobReply:
        """The name of a job, so many times."""
        return pb.EchoJobReply(words=[request.job_id] * bounded(request, "times"))

''',
    ),
)

USES = """
import asyncio, json, sys
from pathlib import Path

import httpx

from paceline.front.client import AsyncClient, Client
from paceline.platform.transport.rpc_authorization import callers
from paceline.platform.transport.rpc import call, connect
from paceline.v1 import jobs_pb2
from paceline.v1.jobs_pb2_grpc import JobsStub

run_dir = Path(sys.argv[1])
where = json.loads((run_dir / "gateway.json").read_text())
token = (run_dir / "token").read_text().strip()
path = f"{where['http']}/v1/jobs/a/echo"
with_token = {"authorization": f"Bearer {token}"}

async def over_grpc():
    async with connect(where["grpc"], token=token) as channel:
        reply = await call(JobsStub(channel).EchoJob, jobs_pb2.EchoJobRequest(job_id="a", times=3))
    async with AsyncClient(where["http"], token=token) as client:
        return list(reply.words), (await client.echo("a")).words

with Client(where["http"], token=token) as client:
    sdk = client.echo("a", times=4).words
openapi = httpx.get(f"{where['http']}/openapi.json").json()
print(json.dumps({
    "rest": httpx.get(path, headers=with_token).json(),
    "bound": httpx.get(path, headers=with_token, params={"times": 6}).status_code,
    "stranger": httpx.get(path).status_code,
    "grpc": asyncio.run(over_grpc()),
    "sdk": sdk,
    "openapi": "/v1/jobs/{job_id}/echo" in openapi["paths"],
    "callers": {
        server: sorted(rows["Jobs"]["EchoJob"] or ["users"])
        for server, rows in callers().items()
        if "Jobs" in rows
    },
}))
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree with the RPC, with generated files updated."""
    folder = copied_tree(tmp_path_factory.mktemp("tree"))
    for name, before, text in EDITS:
        path = folder / name
        assert path.read_text().count(before) == 1, (name, before)
        path.write_text(path.read_text().replace(before, text + before))
    subprocess.run([sys.executable, "dev/generate.py"], cwd=folder, env=env_of(folder), check=True)
    return folder


def is_ready(addresses: Path) -> bool:
    """Whether the gateway and its upstream answer."""
    with suppress(OSError, httpx.TransportError):
        return httpx.get(f"{json.loads(addresses.read_text())['http']}/readyz").is_success
    return False


@pytest.fixture
def run_dir(tree: Path, tmp_path: Path, until: Callable[..., None]) -> Iterator[Path]:
    """The run directory of the copy's platform, once it accepts jobs."""
    command = [
        sys.executable,
        "-m",
        "paceline.front.cli",
        "up",
        "--run-dir",
        str(tmp_path),
        "--port=0",
    ]
    up = subprocess.Popen(command, env=env_of(tree), cwd=tree)
    try:
        until(lambda: is_ready(tmp_path / "gateway.json"), "no platform")
        yield tmp_path
    finally:
        up.send_signal(signal.SIGTERM)
        up.wait(PATIENCE_S)


def test_a_new_rpc_is_served_over_grpc_rest_and_the_sdk(tree: Path, run_dir: Path) -> None:
    command = [sys.executable, "-c", USES, str(run_dir)]
    used = subprocess.run(command, env=env_of(tree), capture_output=True, text=True, check=False)
    assert used.returncode == 0, used.stderr
    assert json.loads(used.stdout) == {
        "rest": {"words": ["a"] * 2},
        "bound": 422,
        "stranger": 401,
        "grpc": [["a"] * 3, ["a"] * 2],
        "sdk": ["a"] * 4,
        "openapi": True,
        "callers": {"gateway": ["users"], "experience": ["gateway"]},
    }
    assert "`GET /v1/jobs/{job_id}/echo?times`" in (tree / "docs" / "api.md").read_text()
    assert "`EchoJob`" in (tree / "docs" / "security.md").read_text()
    # Written by hand: three files, and one more for the test that a new RPC needs.
    assert len({name for name, _, _ in EDITS}) == 3
