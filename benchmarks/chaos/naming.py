"""How long the status of a job takes to name who keeps it: refusals, failing starts, silent hangs.

Each kind has words that the answer must have: a service that is blamed for another's hang is none.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from chaos.site import Site, wait_for
from chaos.world import MOOD, set_mood

from paceline.errors import DeadlineError, PacelineError, UnavailableError
from paceline.types import JobStatus

PATIENCE_S = 90.0
"""Seconds until a kind counts as not named."""
STEPS = 8
"""After which a job counts as one that gets on."""
NEVER_S = 10_000_000.0  # a plug-in that hangs is not ended by its timeout
Spec = dict[str, Any]
Change = Callable[[Spec], None]


@dataclass(frozen=True, slots=True)
class Kind:
    """What is wrong: with the job file, or after a step of a job; and who is named for it."""

    names: str  # regular expression
    spoil: Change | None = None  # of the job file
    needs: Change | None = None  # of the job file, for what follows
    mood: tuple[str, str] | None = None  # of a plug-in
    frozen: str = ""  # beginning of the names of processes; `JOB` stands for the id


@dataclass(frozen=True, slots=True)
class Named:
    """What came of a kind."""

    kind: str
    seconds: float | None  # until the culprit was named; None: not in time
    words: str


def _refuse_reward(spec: Spec) -> None:
    spec["reward"][0]["kind"] = "chaos_that_is_not_installed"


def _refuse_world(spec: Spec) -> None:
    spec["tasks"]["environment"] = "chaos_that_is_not_installed"


def _refuse_layers(spec: Spec) -> None:
    """A model with layers that the torch engine lacks."""
    found = Path(spec["model"]["path"])
    folder = Path(spec["tasks"]["options"]["notes"]) / "linear"
    shutil.copytree(found, folder, dirs_exist_ok=True)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"layer_types": ["linear_attention"] * 2}
    path.write_text(json.dumps(config))
    spec["model"]["path"] = str(folder)
    spec["rollout"]["engine"] = {"kind": "torch"}


def _refuse_option(spec: Spec) -> None:
    spec["rollout"]["engine"]["chaos"] = True


def _fail_engine(how: str, spec: Spec) -> None:
    spec["rollout"]["engine"]["fails"] = how


def _evaluate(spec: Spec) -> None:
    """With a worker that goes on training while the other one is held."""
    spec["rollout"]["replicas"] = 2
    spec["eval"] = {"every": 5, "tasks": 8, "timeout_s": 3600.0, "options": {"held_out": True}}


def _train_on_two_ranks(spec: Spec) -> None:
    spec["trainer"]["world_size"] = 2


def _sample_on_two_workers(spec: Spec) -> None:
    notes = spec["tasks"]["options"]["notes"]
    spec["rollout"] = {"engine": {"kind": "deceiving", "notes": notes}, "replicas": 2}


KINDS: Mapping[str, Kind] = {
    "refused: reward that is not installed": Kind(r"reward.*chaos_that_is", _refuse_reward),
    "refused: world that is not installed": Kind(r"tasks.*chaos_that_is", _refuse_world),
    "refused: layers that the engine lacks": Kind(r"layer_types|linear_att", _refuse_layers),
    "refused: option that the engine lacks": Kind(r"rollout\.engine\.chaos", _refuse_option),
    "start fails: rollout, a missing module": Kind(
        r"^rollout-.*chaos_kernels", partial(_fail_engine, "import")
    ),
    "start fails: rollout, no memory": Kind(
        r"^rollout-.*cannot allocate", partial(_fail_engine, "memory")
    ),
    "start fails: rollout, a flag": Kind(
        r"^rollout-.*unrecognized arguments", partial(_fail_engine, "flag")
    ),
    "step fails: trainer": Kind(r"^trainer.*with a bug", mood=("trainer", "raise")),
    "hangs: trainer": Kind(r"; trainer-\S+ is training step \d+", mood=("trainer", "hang")),
    "hangs: rollout": Kind(
        r"^no progress since .* rollout: .*; rollout-\S+ has", mood=("rollout", "hang")
    ),
    "hangs: reward": Kind(r"UTC: reward: ", mood=("reward", "hang")),
    "hangs: environment": Kind(
        r"^no progress since .* environment: .* step", mood=("environment", "hang")
    ),
    "hangs: trainer, rank 1 of 2": Kind(
        r"; trainer-\S+, rank 1 of 2, is training step \d+",
        needs=_train_on_two_ranks,
        mood=("trainer", "hang rank 1"),
    ),
    "hangs: evaluation": Kind(
        r"evaluation of version \d+ \(.* UTC: rollout: .*; rollout-\S+ has",
        needs=_evaluate,
        mood=("rollout", "hang evaluation"),
    ),
    "wrong: rollout": Kind(
        r"^rollout(: rollout-\S+-1 \(since version|-\S+-1 failed once .* other log-probs)",
        needs=_sample_on_two_workers,
        mood=("rollout", "deceive"),
    ),
    "frozen: trainer": Kind(r"UTC: trainer: none", frozen="trainer-JOB"),
    "frozen: rollout": Kind(r"UTC: rollout: no worker", frozen="rollout-JOB"),
    "frozen: environment": Kind(r"UTC: environment: no worker", frozen="environment"),
    "frozen: reward": Kind(r"UTC: reward: ", frozen="reward"),
}


class Naming:
    """Brings each kind about in a small job of its own, and reads the status of the job."""

    def __init__(self, site: Site, model: Path) -> None:
        self._site = site
        self._model = model
        self._jobs = 0

    def run(self, wanted: str) -> list[Named]:
        """Results of all kinds whose names match a regular expression."""
        found: list[Named] = []
        for name, kind in KINDS.items():
            if re.search(wanted, name):
                found.append(Named(name, *self._of(kind)))
                print(f"  {found[-1]}", file=sys.stderr, flush=True)
        return found

    def _of(self, kind: Kind) -> tuple[float | None, str]:
        spec = self._spec()
        for change in filter(None, (kind.needs, kind.spoil)):
            change(spec)
        began = time.monotonic()
        try:
            job_id = self._submit(spec)
        except PacelineError as error:
            took_s, words = time.monotonic() - began, error.message
            return (took_s if re.search(kind.names, words) else None), words
        try:
            if kind.spoil is None and not self._until(job_id, lambda status: status.step >= STEPS):
                return None, "no step"
            with self._trouble(kind, job_id):
                began = time.monotonic()
                told = partial(_names, kind)
                is_named = self._until(job_id, told)
                took_s = time.monotonic() - began
            return (took_s if is_named else None), self._site.client.get(job_id).status.reason
        finally:
            self._end(job_id)

    def _submit(self, spec: Spec) -> str:
        """Id of the job; a gateway that is busy is asked again."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return self._site.client.submit(spec, request_id=spec["name"]).status.job_id
            except (UnavailableError, DeadlineError):
                if time.monotonic() > deadline:
                    raise

    @contextmanager
    def _trouble(self, kind: Kind, job_id: str) -> Generator[None]:
        beginning = kind.frozen.replace("JOB", job_id)
        names = self._site.names(beginning) if beginning else []
        pids = [pid for name in names if (pid := self._site.pid_of(name))]
        if kind.mood is not None:
            of, how = kind.mood
            set_mood(self._site.notes, of=of, how=how, until=time.time() + NEVER_S, share=1.0)
        try:
            _signal(pids, signal.SIGSTOP)
            yield
        finally:
            _signal(pids, signal.SIGCONT)
            (self._site.notes / MOOD).unlink(missing_ok=True)

    def _until(self, job_id: str, wanted: Callable[[JobStatus], bool]) -> bool:
        def reached() -> bool:
            with suppress(PacelineError):
                return wanted(self._site.client.get(job_id).status)
            return False

        return wait_for(reached, PATIENCE_S)

    def _end(self, job_id: str) -> None:
        with suppress(PacelineError):
            self._site.client.cancel(job_id, reason="its culprit was named")
        self._until(job_id, lambda status: status.state.terminal)

    def _spec(self) -> Spec:
        self._jobs += 1
        notes = {"notes": str(self._site.notes)}
        return copy.deepcopy(
            {
                "name": f"naming-{self._jobs}",
                "model": {"path": str(self._model)},
                "tasks": {
                    "environment": "chaos",
                    "options": {**notes, "pause_s": 0.0},
                    "step_timeout_s": 25.0,
                },
                "sampling": {"max_tokens": 4, "max_context": 40, "on_truncation": "score"},
                "reward": [{"kind": "chaos", **notes, "pause_s": 0.0, "timeout_s": 25.0}],
                "experience": {"batch_groups": 2, "group_size": 4, "filters": []},
                "rollout": {"engine": {"kind": "moody", **notes}},
                "trainer": {"hooks": [{"kind": "chaos", **notes}]},
                "stop": {"steps": 1_000_000},
            }
        )


def _names(kind: Kind, status: JobStatus) -> bool:
    return re.search(kind.names, status.reason) is not None


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
