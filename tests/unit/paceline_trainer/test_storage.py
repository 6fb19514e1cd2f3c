"""Checkpoints in a storage that fails at any of its operations, and with two writers at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.config.job import OptimizerSpec
from paceline.errors import ConfigError, PacelineError, UnavailableError
from paceline_harness.patience import PATIENCE_S
from paceline_trainer.checkpoints.checkpoint import Checkpoints
from paceline_trainer.checkpoints.folders import META
from paceline_trainer.checkpoints.storage import Storage
from paceline_trainer.ranks.distributed import RankGroup
from paceline_trainer.step.loading import load_policy
from paceline_trainer.step.model import PolicyModel, shard
from paceline_trainer.step.optimizer import Optimizer
from paceline_trainer.step.versions import local

URL = "fragile://bucket/jobs/j/checkpoints"


class Crash(BaseException):
    """The process is gone; nothing of it runs on."""


class Events:
    """Tells a hook of every change; none by default."""

    def __init__(self) -> None:
        self.hook: Callable[[], None] | None = None

    def tell(self) -> None:
        if self.hook is not None:
            self.hook()


class Fragile(MemoryFileSystem):
    """An object store that calls a hook before and after each change of it."""

    protocol = "fragile"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012
    events = Events()

    def _open(self, path: str, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:
        if "r" in mode:
            return super()._open(path, mode, *args, **kwargs)
        self.events.tell()
        found = super()._open(path, mode, *args, **kwargs)
        self.events.tell()
        return found

    def pipe_file(self, path: str, value: Any, mode: str = "overwrite", **kwargs: Any) -> Any:
        self.events.tell()
        super().pipe_file(path, value, mode, **kwargs)
        self.events.tell()

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        self.events.tell()
        super().cp_file(path1, path2, **kwargs)
        self.events.tell()

    def _rm(self, path: str) -> None:
        self.events.tell()
        super()._rm(path)
        self.events.tell()

    def rm_file(self, path: str) -> None:
        self.events.tell()
        super()._rm(path)

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """One by one, as object stores do, in an order that nobody promised."""
        for each in self.expand_path(path, recursive=recursive, maxdepth=maxdepth):
            if self.isfile(each):
                self._rm(each)


@pytest.fixture(autouse=True)
def fragile() -> Iterator[None]:
    fsspec.register_implementation("fragile", Fragile, clobber=True)
    Fragile.store.clear()
    Fragile.events.hook = None
    yield
    Fragile.events.hook = None


class Sealed(MemoryFileSystem):
    """An object store that answers no question."""

    protocol = "sealed"

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        raise PermissionError("403")


class Parts:
    """A policy whose weights say which step and incarnation they are of."""

    def __init__(self, path: Path, group: RankGroup) -> None:
        self.policy: PolicyModel = load_policy(str(path))
        shard(self.policy, group, dtype="float32")
        self.optimizer = Optimizer(self.policy, OptimizerSpec(), total_steps=10)
        self.group = group

    def checkpoints(self, incarnation: int, keep: int = 2) -> Checkpoints:
        return Checkpoints(URL, group=self.group, keep=keep, incarnation=incarnation)

    @torch.no_grad()
    def mark(self, value: float) -> None:
        for parameter in self.policy.parameters():
            parameter.fill_(value)

    def save(self, step: int, incarnation: int) -> None:
        self.mark(step + incarnation / 10)
        self.checkpoints(incarnation).save(step, self.policy, self.optimizer)

    def loaded(self, step: int) -> float:
        """The mark of a checkpoint; all weights have to agree on it."""
        self.mark(-1.0)
        self.checkpoints(99).load(step, self.policy, self.optimizer)
        full = (local(p.detach()) for p in self.policy.parameters())
        values = {value for each in full for value in each.detach().unique().tolist()}
        (value,) = values
        return round(value, 3)


@pytest.fixture(scope="module")
def parts(llama: Path, group: RankGroup) -> Parts:
    return Parts(llama, group)


def crash_at(operation: int) -> None:
    """From the n-th event on, nothing this process does reaches the store."""
    seen = 0

    def hook() -> None:
        nonlocal seen
        seen += 1
        if seen >= operation:
            raise Crash

    Fragile.events.hook = hook


def revive() -> None:
    Fragile.events.hook = None


def count(work: Callable[[], None]) -> int:
    seen = 0

    def hook() -> None:
        nonlocal seen
        seen += 1

    Fragile.events.hook = hook
    work()
    revive()
    return seen


def prepare(parts: Parts) -> None:
    Fragile.store.clear()
    parts.save(10, 1)
    parts.save(20, 1)


def crashed(work: Callable[[], None], operation: int) -> None:
    """Torch wraps what goes wrong below it, so any error may come out."""
    crash_at(operation)
    try:
        work()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | AssertionError):
            raise
    finally:
        revive()


def test_a_death_at_any_operation_leaves_whole_checkpoints_only(parts: Parts) -> None:
    prepare(parts)
    operations = count(lambda: parts.save(30, 1))
    assert operations > 10
    for operation in range(1, operations + 1):
        prepare(parts)
        crashed(lambda: parts.save(30, 1), operation)
        steps = parts.checkpoints(2).steps()
        assert steps[:2] == [10, 20] or steps == [20, 30], (operation, steps)
        assert all(parts.loaded(step) == step + 0.1 for step in steps)
        # Whoever comes next goes on, and nothing is left of the one that died.
        parts.save(30, 2)
        assert parts.checkpoints(2).steps() == [20, 30]
        assert parts.loaded(30) == 30.2
        assert set(Storage(URL).folders()) == {"step-000020.1", "step-000030.2"}


def test_a_storage_that_cannot_be_listed_does_not_look_empty(
    tmp_path: Path, group: RankGroup
) -> None:
    """A trainer would begin again from nothing, and discard what is there."""
    (tmp_path / "disk").write_text("")
    places: list[Path | str] = [tmp_path / "disk" / "checkpoints", "sealed://bucket/checkpoints"]
    fsspec.register_implementation("sealed", Sealed, clobber=True)
    for place in places:
        with pytest.raises(UnavailableError, match="checkpoints/ cannot be listed"):
            Checkpoints(place, group=group, keep=2).find(max_step=7)
    assert Checkpoints(tmp_path / "new", group=group, keep=2).find(max_step=7).step == 0


def test_a_death_while_a_branch_is_discarded(parts: Parts) -> None:
    prepare(parts)
    operations = count(lambda: parts.checkpoints(2).discard_after(10))
    for operation in range(1, operations + 1):
        prepare(parts)
        crashed(lambda: parts.checkpoints(2).discard_after(10), operation)
        assert all(parts.loaded(step) == step + 0.1 for step in parts.checkpoints(2).steps())
        assert parts.loaded(10) == 10.1
        parts.checkpoints(2).discard_after(10)
        assert set(Storage(URL).folders()) == {"step-000010.1"}


@given(
    moves=st.lists(
        st.tuples(st.sampled_from(["save", "die", "left"]), st.integers(1, 60)),
        min_size=1,
        max_size=6,
    )
)
@settings(
    max_examples=10,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
def test_checkpoints_known_to_the_ledger_can_always_be_loaded(
    parts: Parts, moves: list[tuple[str, int]]
) -> None:
    """Saves, deaths at any operation, and rewinds, one incarnation after the other."""
    Fragile.store.clear()
    incarnation, step, told = 1, 0, 0.0
    for what, number in moves:
        if what == "save":
            step += 1
            parts.save(step, incarnation)
            told = step + incarnation / 10
        elif what == "die":
            crashed(lambda i=incarnation, s=step + 1: parts.save(s, i), number)
            incarnation += 1
            step = parts.checkpoints(incarnation).find(max_step=step).step
            parts.checkpoints(incarnation).discard_after(step)
        else:
            incarnation += 1
            parts.checkpoints(incarnation).discard_after(step)
        for each in parts.checkpoints(incarnation).steps():
            assert int(parts.loaded(each)) == each
        assert step == int(told)
        assert not told or parts.loaded(step) == told


def test_a_replaced_trainer_that_keeps_running_does_no_harm(llama: Path, group: RankGroup) -> None:
    """It stops at each operation of a save, another one cleans up and saves, it goes on."""
    old, new = Parts(llama, group), Parts(llama, group)
    prepare(old)
    operations = count(lambda: old.save(30, 1))
    for operation in range(1, operations + 1, 3):
        prepare(old)
        stopped, go = threading.Event(), threading.Event()
        slow = threading.Thread(target=lambda: ended(lambda: old.save(30, 1)))
        hold_at(operation, slow, stopped, go)
        slow.start()
        assert stopped.wait(PATIENCE_S)
        new.checkpoints(2).discard_after(20)
        new.save(25, 2)
        new.save(30, 2)
        go.set()
        slow.join(120)
        assert not slow.is_alive()
        revive()
        assert new.loaded(30) == 30.2
        assert new.loaded(25) == 25.2
        for step in new.checkpoints(2).steps():
            assert int(new.loaded(step)) == step


def ended(work: Callable[[], None]) -> None:
    try:
        work()
    except (PacelineError, FileNotFoundError):
        return


def hold_at(
    operation: int, who: threading.Thread, stopped: threading.Event, go: threading.Event
) -> None:
    seen = 0

    def hook() -> None:
        nonlocal seen
        if threading.current_thread() is not who:
            return
        seen += 1
        if seen == operation:
            stopped.set()
            assert go.wait(PATIENCE_S)

    Fragile.events.hook = hook


def test_an_unknown_store_is_refused() -> None:
    with pytest.raises(ConfigError, match="storage: 'nowhere://bucket': Protocol not known"):
        Storage("nowhere://bucket")


def test_a_folder_by_path_or_url(tmp_path: Path) -> None:
    for place in (tmp_path / "a", str(tmp_path / "b"), f"file://{tmp_path}/c"):
        storage = Storage(place)
        assert storage.folders() == {}
        folder = Path(storage.path_of("x"))
        folder.mkdir(parents=True)
        storage.commit("x", META, b"{}")
        assert storage.folders() == {"x": {META: 2}}
        assert storage.read("x", META) == b"{}"
        storage.remove("x", first=META)
        assert not folder.exists()
        with pytest.raises(FileNotFoundError):
            storage.read("x", META)
