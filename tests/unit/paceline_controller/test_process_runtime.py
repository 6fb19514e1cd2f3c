import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from paceline.config import ServiceSettings, load_settings
from paceline.config.service import ControllerOptions
from paceline.enums import WorkerKind
from paceline.front.local.devices.device import Device
from paceline.front.local.ports import PortSlots
from paceline_controller.jobs.plan import Wanted
from paceline_controller.reconciler import Reconciler
from paceline_controller.runtimes.process import LOAD_TIMEOUT_S, ProcessRuntime
from paceline_harness.patience import PATIENCE_S
from paceline_harness.runtime import MadeUpCredentials, MemoryLedger

SERVICE = """
import sys
from paceline.platform.server.chassis import Chassis, Service, main

async def build(chassis: Chassis) -> Service:
    return Service()

sys.exit(main(build))
"""
REWARD = Wanted("reward-0", WorkerKind.REWARD)
OPTIONS = ControllerOptions(period_s=0.05, max_restart_backoff_s=1)


async def until(holds: Callable[[], Awaitable[bool]], timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not await holds():
        assert time.monotonic() < deadline, "waited for too long"
        await asyncio.sleep(0.05)


def make(
    run_dir: Path,
    *,
    stale_s: float = 60.0,
    load_timeout_s: float = LOAD_TIMEOUT_S,
    experience: str = "x:1",
) -> ProcessRuntime:
    (run_dir / "service.py").write_text(SERVICE)
    settings = ServiceSettings(
        kind=WorkerKind.CONTROLLER,
        worker_id="controller-0",
        run_dir=run_dir,
        experience=experience,
        insecure=True,
    )

    def command(wanted: Wanted, path: Path) -> Sequence[str]:
        return [sys.executable, str(run_dir / "service.py"), str(path)]

    beat = run_dir / "controller.beat"
    beat.touch()
    return ProcessRuntime(
        settings,
        credentials=MadeUpCredentials(),
        ports=PortSlots(run_dir / "ports.json"),
        beat=beat,
        child_grace_s=60.0,
        stale_s=stale_s,
        load_timeout_s=load_timeout_s,
        command=command,
    )


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[ProcessRuntime]:
    made = make(tmp_path)
    yield made
    for found in await made.list():
        await made.stop(found.name, grace_s=0)


async def pid_of(run_dir: Path) -> int:
    found = [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if str(run_dir / "settings" / "reward-0.yaml") in (process.info["cmdline"] or [])
    ]
    return found[0] if found else 0


async def is_ready(runtime: ProcessRuntime) -> bool:
    return await runtime.ready("reward-0")


async def test_start_ready_stop(runtime: ProcessRuntime, tmp_path: Path) -> None:
    await runtime.start(REWARD, incarnation=0)
    await until(lambda: is_ready(runtime))
    assert [(found.name, found.alive) for found in await runtime.list()] == [("reward-0", True)]
    assert "serving" in (tmp_path / "logs" / "reward-0.log").read_text()
    await runtime.stop("reward-0", grace_s=60)
    assert await runtime.list() == []
    assert "stopped" in (tmp_path / "logs" / "reward-0.log").read_text()


async def test_settings_of_a_child(runtime: ProcessRuntime, tmp_path: Path) -> None:
    wanted = Wanted("trainer-a-1", WorkerKind.TRAINER, job_id="a-1")
    await runtime.start(wanted, incarnation=7)
    path = tmp_path / "settings" / "trainer-a-1.yaml"
    settings = load_settings(path)
    assert settings.options["incarnation"] == 7
    assert settings.options["weights_port"] > 0
    assert (settings.kind, settings.job_id) == (WorkerKind.TRAINER, "a-1")
    assert settings.experience == "x:1"
    assert settings.supervisor is not None
    assert settings.supervisor.path == tmp_path / "controller.beat"
    assert path.stat().st_mode & 0o077 == 0


async def test_ports_stay_over_restarts(runtime: ProcessRuntime, tmp_path: Path) -> None:
    await runtime.start(REWARD, incarnation=0)
    before = load_settings(tmp_path / "settings" / "reward-0.yaml")
    await runtime.stop("reward-0", grace_s=0)
    await runtime.start(REWARD, incarnation=0)
    after = load_settings(tmp_path / "settings" / "reward-0.yaml")
    assert (after.port, after.metrics_port) == (before.port, before.metrics_port)


@pytest.mark.parametrize("world", [1, 2])
def test_several_ranks_are_started_by_torchrun(tmp_path: Path, world: int) -> None:
    settings = ServiceSettings(
        kind=WorkerKind.CONTROLLER, worker_id="controller-0", run_dir=tmp_path
    )
    made = ProcessRuntime(
        settings,
        credentials=MadeUpCredentials(),
        ports=PortSlots(tmp_path / "ports.json"),
        beat=tmp_path / "beat",
        child_grace_s=1.0,
    )
    wanted = Wanted("trainer-a-1", WorkerKind.TRAINER, job_id="a-1", world_size=world)
    command = list(made.command_of(wanted, Path("/run/s.yaml")))
    assert command[-3:] == ["-m", "paceline_trainer", "/run/s.yaml"]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2"] if world > 1 else []
    assert command[1:-3][: len(torchrun) + 1] == ["-P", *torchrun]
    assert ("--max-restarts" in command) == (world > 1)


async def test_kill_9_leads_to_a_restart(runtime: ProcessRuntime, tmp_path: Path) -> None:
    options = OPTIONS.model_copy(update={"environment_replicas": 1})
    reconciler = Reconciler(
        ledger=MemoryLedger(), runtime=runtime, options=options, child_grace_s=60.0
    )
    task = asyncio.create_task(reconciler.run())
    await until(lambda: is_ready(runtime))
    first = await pid_of(tmp_path)
    os.kill(first, signal.SIGKILL)

    async def replaced() -> bool:
        return await pid_of(tmp_path) not in {0, first} and await is_ready(runtime)

    await until(replaced)
    task.cancel()
    await reconciler.stop_all()
    assert await pid_of(tmp_path) == 0


LOADS = """
import asyncio, pathlib, sys
from paceline.platform.server.chassis import Chassis, Service, main

async def build(chassis: Chassis) -> Service:
    while not pathlib.Path(__file__).with_name("loaded").exists():
        await asyncio.sleep(0.05)
    return Service()

sys.exit(main(build))
"""


async def test_a_process_that_loads_is_pending_until_it_is_ready_or_its_time_is_over(
    runtime: ProcessRuntime, tmp_path: Path
) -> None:
    """So that it does not count as hanging, however long its model takes."""
    (tmp_path / "service.py").write_text(LOADS)
    await runtime.start(REWARD, incarnation=0)

    async def is_pending(of: ProcessRuntime = runtime) -> bool:
        return (await of.list())[0].pending

    await until(is_pending)
    assert not await is_ready(runtime)
    assert await is_pending(make(tmp_path))  # to another controller too
    assert not await is_pending(make(tmp_path, load_timeout_s=0.001))
    (tmp_path / "service.py").write_text(LOADS)  # which `make` has replaced
    (tmp_path / "loaded").touch()
    await until(lambda: is_ready(runtime))
    assert not await is_pending()


async def test_another_controller_adopts(runtime: ProcessRuntime, tmp_path: Path) -> None:
    await runtime.start(REWARD, incarnation=0)
    await until(lambda: is_ready(runtime))
    other = make(tmp_path)
    assert [(found.name, found.alive) for found in await other.list()] == [("reward-0", True)]
    await until(lambda: is_ready(other))
    assert not (await other.list())[0].outdated
    assert (await make(tmp_path, experience="y:2").list())[0].outdated


async def test_a_child_exits_without_its_controller(tmp_path: Path) -> None:
    runtime = make(tmp_path, stale_s=0.5)
    await runtime.start(REWARD, incarnation=0)

    async def ended() -> bool:
        return not (await runtime.list())[0].alive

    await until(ended)
    assert "supervisor is gone" in await runtime.last_words("reward-0")


async def test_an_unknown_process_is_not_ready(runtime: ProcessRuntime) -> None:
    assert not await runtime.ready("reward-7")
    assert await runtime.last_words("reward-7") == ""


async def test_a_process_sees_only_its_gpus(runtime: ProcessRuntime, tmp_path: Path) -> None:
    seen = tmp_path / "service.py"
    seen.write_text("import os, sys, time; print(os.environ); sys.stdout.flush(); time.sleep(600)")
    gpus = tuple(Device(n, f"GPU-{n}", "H100", 1 << 30) for n in (1, 3))
    wanted = Wanted("rollout-a-0", WorkerKind.ROLLOUT, job_id="a", devices=gpus, memory_share=0.4)
    await runtime.start(wanted, incarnation=0)
    await runtime.start(replace(REWARD, devices=()), incarnation=0)

    async def printed() -> bool:
        texts = [(tmp_path / "logs" / f"{n}.out").read_text() for n in ("rollout-a-0", "reward-0")]
        return (
            "'CUDA_VISIBLE_DEVICES': 'GPU-1,GPU-3'" in texts[0]
            and "'CUDA_VISIBLE_DEVICES': ''" in texts[1]
        )

    await until(printed)
    assert {found.name: found.devices for found in await runtime.list()} == {
        "rollout-a-0": (1, 3),
        "reward-0": (),
    }
    settings = load_settings(tmp_path / "settings" / "rollout-a-0.yaml")
    assert settings.options["memory_share"] == 0.4
