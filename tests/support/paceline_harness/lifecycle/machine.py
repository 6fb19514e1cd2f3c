"""A runtime of the controller that simulates processes, with the files of real ones."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import yaml

from paceline.enums import WorkerKind
from paceline.front.local.ports import PortSlots
from paceline_controller.jobs.observed import Observed
from paceline_controller.jobs.plan import Wanted, replicas_of
from paceline_controller.runtimes.base import CredentialIssuer
from paceline_harness.lifecycle.processes import SimulatedProcess
from paceline_harness.lifecycle.workers import Progress, WorkerContext, work

_START_S = 0.01


@dataclass(slots=True)
class _Worker:
    context: WorkerContext
    process: SimulatedProcess


class Machine:
    """Outlives controllers: the next one adopts what runs. `credentials` are those of the last."""

    def __init__(self, run_dir: Path, experience: str) -> None:
        self._run_dir = run_dir
        self._experience = experience
        self._ports = PortSlots(run_dir / "ports.json")
        self._workers: dict[str, _Worker] = {}
        self._progress = Progress()
        self.credentials: CredentialIssuer | None = None
        for folder in ("settings", "credentials", "logs"):
            (run_dir / folder).mkdir(exist_ok=True)

    def let_jobs_end(self) -> None:
        """From now on jobs are trained to their end."""
        self._progress.may_end.set()

    @property
    def names(self) -> list[str]:
        """All processes, dead or alive."""
        return sorted(self._workers)

    async def kill(self, kind: WorkerKind, job_id: str) -> None:
        """SIGKILL to the processes of a kind: of a job, or those that all share."""
        for each in list(self._workers.values()):
            if each.context.kind is kind and each.context.job_id in ("", job_id):
                await each.process.kill()

    def units(self, wanted: Iterable[Wanted]) -> list[Wanted]:
        """Every replica is a process with a name of its own."""
        return replicas_of(wanted)

    async def list(self) -> list[Observed]:
        """Everything that was started and not stopped since."""
        return [
            Observed(name=name, job_id=each.context.job_id, alive=each.process.alive)
            for name, each in self._workers.items()
        ]

    async def start(self, wanted: Wanted, *, incarnation: int) -> None:
        """Start a worker, with the files that the runtime of processes writes."""
        credential = ""
        if wanted.job_id:
            assert self.credentials is not None
            credential = await self.credentials.credential(
                wanted, worker=wanted.name, incarnation=incarnation
            )
            (self._run_dir / "credentials" / wanted.name).write_text(credential)
        settings = {"kind": str(wanted.kind), "job_id": wanted.job_id}
        (self._run_dir / "settings" / f"{wanted.name}.yaml").write_text(yaml.safe_dump(settings))
        self._ports.take(wanted.name)
        (self._run_dir / "logs" / f"{wanted.name}.log").write_text("started\n")
        await asyncio.sleep(_START_S)
        context = WorkerContext(
            name=wanted.name,
            kind=wanted.kind,
            address=self._experience,
            run_dir=self._run_dir,
            job_id=wanted.job_id,
            incarnation=incarnation,
            credential=credential,
            progress=self._progress,
        )
        process = SimulatedProcess(wanted.name)
        await process.start(work(context))
        self._workers[wanted.name] = _Worker(context, process)

    async def scale(self, name: str, replicas: int) -> None:
        """A process is always one."""
        raise AssertionError(name)

    async def stop(self, name: str, *, grace_s: float) -> None:
        """SIGTERM, the grace, SIGKILL."""
        found = self._workers.get(name)
        if found is not None:
            found.context.stopping.set()
            if found.process.main is not None:
                await asyncio.wait({found.process.main}, timeout=grace_s)
            await found.process.kill()
            self._workers.pop(name, None)
        (self._run_dir / "credentials" / name).unlink(missing_ok=True)

    async def ready(self, name: str) -> bool:
        """Whether it runs."""
        return name in self._workers and self._workers[name].process.alive

    async def last_words(self, name: str) -> str:
        """The error that has ended it."""
        found = self._workers.get(name)
        return "" if found is None else found.process.last_words

    def ends(self) -> dict[str, str]:
        """The errors that have ended processes; empty: they are alive."""
        return {name: each.process.last_words for name, each in self._workers.items()}

    def waits_for(self, job_id: str) -> str:
        """A machine refuses no process."""
        return ""

    def rollouts_of(self, job_id: str) -> int:
        """Number of rollout workers."""
        contexts = [each.context for each in self._workers.values()]
        return sum(p.kind is WorkerKind.ROLLOUT and p.job_id == job_id for p in contexts)

    async def close(self) -> None:
        """Kill everything."""
        for each in self._workers.values():
            await each.process.kill()
        self._workers.clear()
