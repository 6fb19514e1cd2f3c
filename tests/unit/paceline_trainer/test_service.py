"""The trainer as processes, started as the controller starts them."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from paceline.config import ServiceSettings
from paceline.errors import ConfigError
from paceline.platform.transport.rpc import connect
from paceline.v1 import trainer_pb2 as pb
from paceline.v1.options_pb2 import WORKER_KIND_TRAINER
from paceline.v1.trainer_pb2_grpc import TrainerStub
from paceline_harness.patience import PATIENCE_S, call
from paceline_harness.ports import free_port
from paceline_harness.processes import ON_CPU, place_of
from paceline_trainer.checkpoints.folders import META
from paceline_trainer.checkpoints.format import INDEX, file_of
from paceline_trainer.ranks.distributed import device_of
from paceline_trainer.ranks.rank_info import RankInfo, find_rank
from paceline_trainer.start import of_rank, run

LIMIT_S = PATIENCE_S
TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]


def settings_file(folder: Path, address: str, **options: Any) -> Path:
    path = folder / "trainer.yaml"
    settings = {
        "kind": "trainer",
        "worker_id": "trainer-1",
        "run_dir": str(folder),
        "experience": address,
        "job_id": "j",
        "grace_s": 120.0,
        "insecure": True,
        "options": {"incarnation": 1} | options,
    }
    path.write_text(yaml.safe_dump(settings))
    return path


def start(forks: Any, settings: Path, *, ranks: int = 0) -> Any:
    """Under torchrun, or (ranks=0) one process with the environment that torchrun would set."""
    where = place_of(ranks or 1)
    if not ranks:
        where = {**where, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    prefix = [*TORCHRUN, f"--nproc-per-node={ranks}"] if ranks else []
    return forks.start([*prefix, "-m", "paceline_trainer", str(settings)], where)


def start_node(forks: Any, settings: Path, *, node: int, port: int) -> Any:
    """One of two nodes with a rank each, as in a pod."""
    torchrun = ["-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}"]
    torchrun += ["--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}"]
    torchrun += ["--max-restarts=0", "-m", "paceline_trainer", str(settings)]
    # Both would take GPU 0 of this machine.
    return forks.start(torchrun, ON_CPU)


async def commits(ledger: Any, count: int, process: Any) -> None:
    async with asyncio.timeout(LIMIT_S):
        while len(ledger.commits) < count:
            assert process.code is None, process.output
            await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_two_nodes_train_and_exit_cleanly_when_one_is_drained(
    one_job: Any, forks: Any, tmp_path: Path
) -> None:
    """At the end, the rank of the other node waits for a batch that does not come."""
    path, port = settings_file(tmp_path, one_job.address), free_port()
    one_job.holds_from = 3
    one_job.fresh, one_job.refused = True, {1}
    nodes = [start_node(forks, path, node=node, port=port) for node in (0, 1)]
    await commits(one_job, 3, nodes[0])
    nodes[1].send(signal.SIGTERM)
    async with asyncio.timeout(LIMIT_S):
        while one_job.workers:
            await asyncio.sleep(0.02)
    assert one_job.checkpoints == [2, 3]
    assert [version.step for version in one_job.versions] == [0, 1, 1, 2, 3]  # one again
    assert {rank for _, _, rank in one_job.taken} == {0, 1}
    newest = tmp_path / "jobs" / "j" / "checkpoints" / "step-000003.1"
    assert {path.name for path in newest.iterdir()} == {META, INDEX, file_of(0), file_of(1)}
    # Its torchrun waits for that of the drained node; Kubernetes ends the whole job then.
    nodes[0].send(signal.SIGTERM)
    for _, output in await asyncio.gather(*(node.end() for node in nodes)):
        assert "ChildFailedError" not in output
        assert "disagrees" not in output


@pytest.mark.slow
async def test_the_trainer_joins_answers_and_exits_cleanly(
    one_job: Any, forks: Any, tmp_path: Path
) -> None:
    one_job.limit = 100_000
    path = settings_file(tmp_path, one_job.address)
    path.write_text(f"{path.read_text()}storage: file://{tmp_path}/bucket\n")
    process = start(forks, path)
    await commits(one_job, 2, process)
    worker = one_job.workers["trainer-1"]
    assert worker.kind == WORKER_KIND_TRAINER
    assert worker.weights_endpoint == one_job.versions[0].weights_endpoint
    async with connect(worker.endpoint) as channel:
        status = await call(
            TrainerStub(channel).Status, pb.TrainerStatusRequest(), timeout_s=PATIENCE_S
        )
    assert status.step >= 2
    process.send(signal.SIGTERM)
    code, output = await process.end()
    assert code == 0, output
    assert one_job.checkpoints[-1] == one_job.step
    assert one_job.workers == {}
    checkpoints = sorted(
        (tmp_path / "bucket" / "jobs" / "j" / "checkpoints").glob("*/paceline.json")
    )
    assert checkpoints[-1].parent.name == f"step-{one_job.step:06d}.1"
    assert not (tmp_path / "jobs" / "j" / "checkpoints").exists()


@pytest.mark.slow
async def test_a_killed_rank_ends_the_others(one_job: Any, forks: Any, tmp_path: Path) -> None:
    one_job.limit = 100_000
    process = start(forks, settings_file(tmp_path, one_job.address), ranks=2)
    await commits(one_job, 2, process)
    ranks = psutil.Process(process.pid).children()
    ranks[-1].kill()
    code, _ = await process.end()
    assert code != 0
    _, alive = await asyncio.to_thread(psutil.wait_procs, ranks, timeout=LIMIT_S)
    assert alive == []


@pytest.mark.slow
async def test_ranks_end_when_torchrun_is_killed(one_job: Any, forks: Any, tmp_path: Path) -> None:
    one_job.limit = 100_000
    process = start(forks, settings_file(tmp_path, one_job.address), ranks=1)
    await commits(one_job, 1, process)
    ranks = psutil.Process(process.pid).children()
    process.send(signal.SIGKILL)
    _, alive = await asyncio.to_thread(psutil.wait_procs, ranks, timeout=LIMIT_S)
    assert alive == []


@pytest.mark.slow
async def test_a_replaced_incarnation_ends_quietly(
    one_job: Any, forks: Any, tmp_path: Path
) -> None:
    one_job.incarnation = 2
    code, output = await start(forks, settings_file(tmp_path, one_job.address)).end()
    assert code == 4
    assert "a newer incarnation runs" in output
    assert "Traceback" not in output


@pytest.mark.slow
async def test_a_job_it_cannot_train(one_job: Any, forks: Any, tmp_path: Path) -> None:
    one_job.spec["trainer"] = {"objective": {"corrections": [{"kind": "tis", "cup": 1}]}}
    message = "cup: unknown field; allowed here"
    code, output = await start(forks, settings_file(tmp_path, one_job.address)).end()
    assert code == 2
    assert message in output
    assert one_job.state == "failed"
    assert message in one_job.reason
    assert "Traceback" not in output


def test_wrong_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = settings_file(tmp_path, "127.0.0.1:1", cats=3)
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    assert run([str(path)], environment) == 2
    assert "cats: unknown field; allowed here: incarnation" in capsys.readouterr().err
    assert run([str(settings_file(tmp_path, ""))], environment) == 2
    assert run([str(settings_file(tmp_path, "a:1"))], {}) == 2
    assert "torch.distributed.run" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        run([], environment)


def test_place_of_a_rank() -> None:
    environment = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}
    rank_info = find_rank(environment)
    assert rank_info.parent == 0  # who started it may end before it does
    assert (rank_info.rank, rank_info.local_rank, rank_info.world) == (3, 1, 4)
    assert not rank_info.orphaned
    assert find_rank({**environment, "TORCHELASTIC_RUN_ID": "none"}).parent == os.getppid()


@pytest.mark.parametrize(("rank", "num_gpus", "device"), [(1, 0, "cpu"), (1, 2, "cuda:1")])
def test_each_rank_has_a_gpu_or_none_has(rank: int, num_gpus: int, device: str) -> None:
    rank_info = RankInfo(rank=rank, local_rank=rank, world=2, local_world=2)
    assert str(device_of(rank_info, num_gpus)) == device


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_refuses_a_node_with_fewer_gpus_than_ranks(rank: int) -> None:
    """One that did not would wait for the others."""
    environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    rank_info = find_rank({**environment, "LOCAL_WORLD_SIZE": "2"})
    with pytest.raises(ConfigError, match=r"trainer\.world_size: 2 ranks on a node that has 1 GPU"):
        device_of(rank_info, 1)


def test_the_first_rank_of_a_node_has_its_ports_and_rank_0_reports(tmp_path: Path) -> None:
    settings = ServiceSettings.model_validate(
        {
            "kind": "trainer",
            "worker_id": "t",
            "port": 5,
            "metrics_port": 6,
            "advertise": "a:5",
            "logs": {"path": str(tmp_path / "t.log")},
        }
    )
    assert of_rank(settings, RankInfo(world=4)) == settings
    beside = of_rank(settings, RankInfo(rank=1, local_rank=1, world=4))
    assert (beside.port, beside.metrics_port, beside.advertise) == (0, 0, "")
    assert (beside.worker_id, beside.logs.path) == ("t-rank1", tmp_path / "t-rank1.log")
    elsewhere = of_rank(settings, RankInfo(rank=2, local_rank=0, world=4))
    assert (elsewhere.port, elsewhere.metrics_port, elsewhere.advertise) == (5, 6, "a:5")
    assert elsewhere.worker_id == "t-rank2"


@pytest.mark.slow
async def test_the_cause_of_a_failure_is_reported(one_job: Any, forks: Any, tmp_path: Path) -> None:
    (tmp_path / "jobs" / "j").mkdir(parents=True)
    (tmp_path / "jobs" / "j" / "checkpoints").write_text("no folder")
    code, _ = await start(forks, settings_file(tmp_path, one_job.address)).end()
    assert code != 0
    [(incarnation, reason)] = one_job.failures
    assert incarnation == 1
    assert "checkpoints" in reason
    assert reason.endswith("(rank 0)")
