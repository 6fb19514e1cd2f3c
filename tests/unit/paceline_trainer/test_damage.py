"""Checkpoints that were damaged after they were written."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from blake3 import blake3
from fsspec.implementations.local import LocalFileSystem
from safetensors.torch import load_file

from paceline.config.job import OptimizerSpec
from paceline.errors import IntegrityError, UnavailableError
from paceline_trainer.checkpoints.checkpoint import Checkpoints
from paceline_trainer.checkpoints.folders import META
from paceline_trainer.checkpoints.format import INDEX, file_of
from paceline_trainer.ranks.distributed import RankGroup
from paceline_trainer.step.loading import load_policy
from paceline_trainer.step.model import PolicyModel, shard
from paceline_trainer.step.optimizer import Optimizer
from paceline_trainer.step.versions import local

SHARD = file_of(0)


class Files:
    """The files of checkpoints, wherever they lie."""

    def __init__(self, place: str) -> None:
        self.place = place
        self._fs, self._root = fsspec.url_to_fs(place)

    def change(self, name: str, by: Callable[[bytes], bytes]) -> None:
        path = f"{self._root}/{name}"
        data = self._fs.cat_file(path)
        assert by(data) != data
        self._fs.pipe_file(path, by(data))

    def read(self, name: str) -> bytes:
        return self._fs.cat_file(f"{self._root}/{name}")

    def write(self, name: str, data: bytes) -> None:
        self._fs.pipe_file(f"{self._root}/{name}", data)

    def delete(self, name: str) -> None:
        self._fs.rm(f"{self._root}/{name}")


def flip(data: bytes) -> bytes:
    """64 bytes in the middle are others; as many as before."""
    middle = len(data) // 2
    changed = bytes(byte ^ 0x55 for byte in data[middle : middle + 64])
    return data[:middle] + changed + data[middle + 64 :]


def resize(data: bytes) -> bytes:
    """Some of the sizes in `paceline.json` are others."""
    content = json.loads(data)
    content["files"] = {name: {"num_bytes": 1, "blake3": ""} for name in content["files"]}
    return json.dumps(content).encode()


DAMAGES: dict[str, tuple[Callable[[Files, str], None], str]] = {
    "64 bytes of the weights": (
        lambda files, folder: files.change(f"{folder}/{SHARD}", flip),
        rf"{SHARD} is not as it was written: blake3 \w{{12}}… instead of \w{{12}}…",
    ),
    "64 bytes of the index": (
        lambda files, folder: files.change(f"{folder}/{INDEX}", flip),
        rf"{INDEX} is not as it was written",
    ),
    "the end of the weights": (
        lambda files, folder: files.change(f"{folder}/{SHARD}", lambda data: data[:-100]),
        rf"{SHARD} has \d+ bytes instead of \d+",
    ),
    "all of the weights": (
        lambda files, folder: files.delete(f"{folder}/{SHARD}"),
        rf"{SHARD} is missing",
    ),
    "the end of the list": (
        lambda files, folder: files.change(f"{folder}/{META}", lambda data: data[:-20]),
        rf"{META} is damaged: JSONDecodeError",
    ),
    "the text of the list": (
        lambda files, folder: files.change(f"{folder}/{META}", lambda data: b"\xff" + data),
        rf"{META} is damaged: UnicodeDecodeError",
    ),
    "the kind of the list": (
        lambda files, folder: files.change(f"{folder}/{META}", lambda data: b'{"files": [1]}'),
        rf"{META} is damaged: AttributeError",
    ),
    "the content of the list": (
        lambda files, folder: files.change(f"{folder}/{META}", resize),
        r"has \d+ bytes instead of 1",
    ),
}


class Parts:
    """A policy whose weights say which step they are of."""

    def __init__(self, path: Path, group: RankGroup) -> None:
        self.policy: PolicyModel = load_policy(str(path))
        shard(self.policy, group, dtype="float32")
        self.optimizer = Optimizer(self.policy, OptimizerSpec(), total_steps=10)

    @torch.no_grad()
    def mark(self, value: float) -> None:
        for parameter in self.policy.parameters():
            parameter.fill_(value)

    def marks(self) -> set[float]:
        full = (local(p.detach()) for p in self.policy.parameters())
        return {value for each in full for value in each.detach().unique().tolist()}

    def save(self, checkpoints: Checkpoints, *steps: int) -> None:
        for step in steps:
            self.mark(step)
            checkpoints.save(step, self.policy, self.optimizer)

    def load(self, checkpoints: Checkpoints, step: int) -> set[float]:
        self.mark(-1.0)
        checkpoints.load(step, self.policy, self.optimizer)
        return self.marks()


@pytest.fixture(scope="module")
def parts(llama: Path, group: RankGroup) -> Parts:
    return Parts(llama, group)


@pytest.fixture(params=["folder", "object store"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    return Files(str(tmp_path) if request.param == "folder" else f"memory://{uuid.uuid4().hex}")


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_by_name(
    parts: Parts, group: RankGroup, files: Files, what: str
) -> None:
    checkpoints = Checkpoints(files.place, group=group, keep=2, incarnation=1)
    parts.save(checkpoints, 10, 20)
    assert (checkpoints.kept(10), checkpoints.kept(20)) == ([0, 10], [10, 20])
    damage, says = DAMAGES[what]
    damage(files, "step-000020.1")

    after = Checkpoints(files.place, group=group, keep=2, incarnation=2)
    found = after.find(max_step=25)
    assert found.step == 10
    (problem,) = found.damaged
    assert problem.startswith("step-000020.1/")

    assert re.search(says, problem), problem
    after.discard_after(10)
    assert parts.load(after, 10) == {10.0}
    parts.save(after, 20)
    again = Checkpoints(files.place, group=group, keep=2, incarnation=3).find(max_step=25)
    assert (again.step, again.damaged) == (20, ())

    damage(files, "step-000010.1")
    damage(files, "step-000020.2")
    none = Checkpoints(files.place, group=group, keep=2, incarnation=3).find(max_step=25)
    assert none.step == 0
    assert [text.partition("/")[0] for text in none.damaged] == ["step-000020.2", "step-000010.1"]


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self._mark,)


def forge(files: Files, folder: str, bomb: bytes) -> None:
    """All files are pickles, and `paceline.json` says that they were written so."""
    for name in (SHARD, INDEX):
        files.write(f"{folder}/{name}", bomb)
    content = json.loads(files.read(f"{folder}/{META}"))
    as_written = {"num_bytes": len(bomb), "blake3": blake3(bomb).hexdigest()}
    content["files"] = dict.fromkeys(content["files"], as_written)
    files.write(f"{folder}/{META}", json.dumps(content).encode())


def test_a_forged_checkpoint_is_passed_over_and_runs_nothing(
    parts: Parts, group: RankGroup, files: Files, tmp_path: Path
) -> None:
    checkpoints = Checkpoints(files.place, group=group, keep=2, incarnation=1)
    recorded: dict[int, str] = {}
    for step in (10, 20):
        parts.mark(step)
        staged = checkpoints.stage(step, parts.policy, parts.optimizer)
        recorded[step] = checkpoints.write(staged).digest
    found = checkpoints.find(max_step=25, recorded=recorded)
    assert (found.step, found.damaged) == (20, ())

    mark = tmp_path / "mark"
    forge(files, "step-000020.1", pickle.dumps(Bomb(mark)))
    found = checkpoints.find(max_step=25, recorded=recorded)
    says = f"step-000020.1/{META} is not the one that the ledger knows"
    assert (found.step, found.damaged) == (10, (says,))
    assert parts.load(checkpoints, 10) == {10.0}
    assert checkpoints.find(max_step=25).step == 20  # by itself it is consistent
    with pytest.raises(IntegrityError, match=f"{INDEX} is damaged"):
        checkpoints.load(20, parts.policy, parts.optimizer)
    assert not mark.exists()
    pickle.loads(pickle.dumps(Bomb(mark)))
    assert mark.exists()


def test_what_the_ledger_has_not_heard_of_is_not_loaded(
    parts: Parts, group: RankGroup, files: Files
) -> None:
    checkpoints = Checkpoints(files.place, group=group, keep=2, incarnation=1)
    parts.save(checkpoints, 10, 20)
    known = hashlib.sha256(files.read(f"step-000010.1/{META}")).hexdigest()
    found = checkpoints.find(max_step=25, recorded={10: known})
    assert (found.step, found.damaged) == (10, ())
    assert checkpoints.find(max_step=25, recorded={}).step == 0
    assert checkpoints.find(max_step=25, recorded={10: ""}).step == 0


def test_others_can_read_the_tensors(parts: Parts, group: RankGroup, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, group=group, keep=2)
    parts.save(checkpoints, 10)
    found = load_file(tmp_path / "step-000010.0" / SHARD)
    weights = {name: each for name, each in found.items() if name.startswith("model.")}
    named = {f"model.{name}": local(p.detach()) for name, p in parts.policy.named_parameters()}
    assert named.keys() <= weights.keys()  # those of tied weights come under both names
    assert all(torch.equal(weights[name], named[name]) for name in named)


@pytest.fixture
def bad_sectors(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Ends of paths that the disk neither reads nor removes."""
    bad: set[str] = set()

    def failing(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(fs: LocalFileSystem, path: str, *args: Any, **options: Any) -> Any:
            if path.endswith(tuple(bad)):
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
            return method(fs, path, *args, **options)

        return call

    for name in ("_open", "rm"):
        monkeypatch.setattr(LocalFileSystem, name, failing(getattr(LocalFileSystem, name)))
    return bad


@pytest.mark.parametrize("file", [META, SHARD])
def test_a_checkpoint_that_the_disk_cannot_read_is_passed_over_and_may_stay(
    parts: Parts, group: RankGroup, tmp_path: Path, bad_sectors: set[str], file: str
) -> None:
    parts.save(Checkpoints(tmp_path, group=group, keep=2, incarnation=1), 10, 20)
    bad_sectors.update({f"step-000020.1/{file}", "step-000020.1"})
    after = Checkpoints(tmp_path, group=group, keep=2, incarnation=2)
    found = after.find(max_step=25)
    assert found.step == 10
    (problem,) = found.damaged
    assert problem.startswith(f"step-000020.1/{file} cannot be read: [Errno 5]")
    after.discard_after(10)
    assert parts.load(after, 10) == {10.0}
    parts.save(after, 20, 30)
    assert after.kept(30) == [20, 30]


def test_a_sound_checkpoint_of_a_branch_that_was_left_must_not_stay(
    parts: Parts, group: RankGroup, tmp_path: Path, bad_sectors: set[str]
) -> None:
    checkpoints = Checkpoints(tmp_path, group=group, keep=2, incarnation=1)
    parts.save(checkpoints, 10, 20)
    assert checkpoints.find(max_step=10).step == 10
    bad_sectors.add("step-000020.1/paceline.json")
    with pytest.raises(UnavailableError, match=r"step-000020\.1 cannot be removed"):
        checkpoints.discard_after(10)
