"""A fork copies what the index of a checkpoint lists, and nothing that a trainer linked there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.errors import NotFoundError, UnavailableError
from paceline.platform.digest import digest_of
from paceline_experience.jobs.forks.checkpoint_copies import CheckpointCopy
from paceline_experience.jobs.job_files import JobFiles

SECRET, STEP = "plum", "step-000004.1"


class Checkpoint:
    """The checkpoint of a job, whose trainer may write anything into its folder."""

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / "jobs" / "parent" / "checkpoints" / STEP
        self.copied = run_dir / "jobs" / "child" / "checkpoints" / STEP
        self.secret = run_dir / "jobs" / "other" / "secret"
        self.secret.parent.mkdir(parents=True)
        self.secret.write_text(SECRET)
        (self.folder / "shards").mkdir(parents=True)
        (self.folder / "weights").write_text("w" * len(SECRET))
        (self.folder / "shards" / "first").write_text("s" * len(SECRET))
        self.list("weights", "shards/first")

    def list(self, *names: str) -> None:
        files = {name: {"num_bytes": len(SECRET), "blake3": "b"} for name in names}
        (self.folder / "paceline.json").write_text(json.dumps({"step": 4, "files": files}))

    @property
    def digest(self) -> str:
        return digest_of((self.folder / "paceline.json").read_bytes())


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return Checkpoint(tmp_path)


@pytest.fixture(params=["", "file://"], ids=["run_dir", "storage"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> JobFiles:
    return JobFiles(tmp_path, storage=f"{request.param}{tmp_path}" if request.param else "")


def test_what_the_index_lists_is_copied_and_nothing_else(
    checkpoint: Checkpoint, files: JobFiles
) -> None:
    (checkpoint.folder / "unlisted").write_text("x")
    (checkpoint.folder / "link").symlink_to(checkpoint.secret)
    (checkpoint.folder / "folder").symlink_to(checkpoint.secret.parent)
    files.copy_checkpoint("parent", CheckpointCopy("child", 4, checkpoint.digest))
    there = [each for each in checkpoint.copied.rglob("*") if not each.is_dir()]
    names = sorted(each.relative_to(checkpoint.copied).as_posix() for each in there)
    assert names == ["paceline.json", "shards/first", "weights"]
    assert digest_of((checkpoint.copied / "paceline.json").read_bytes()) == checkpoint.digest
    assert (checkpoint.copied / "weights").read_text() == "w" * len(SECRET)


def a_link(made: Checkpoint) -> None:
    (made.folder / "weights").unlink()
    (made.folder / "weights").symlink_to(made.secret)


def a_linked_folder(made: Checkpoint) -> None:
    (made.folder / "shards" / "first").unlink()
    (made.folder / "shards").rmdir()
    (made.folder / "shards").symlink_to(made.secret.parent)
    made.list("shards/secret")


def a_linked_step(made: Checkpoint) -> None:
    moved = made.secret.parent / "moved"
    made.folder.rename(moved)
    made.folder.symlink_to(moved)


def linked_checkpoints(made: Checkpoint) -> None:
    moved = made.secret.parent / "moved"
    made.folder.parent.rename(moved)
    made.folder.parent.symlink_to(moved)


def a_linked_index(made: Checkpoint) -> None:
    (made.folder / "paceline.json").rename(made.secret.parent / "index")
    (made.folder / "paceline.json").symlink_to(made.secret.parent / "index")


def parents(made: Checkpoint) -> None:
    made.list("../../../other/secret")


def parents_in_between(made: Checkpoint) -> None:
    made.list("shards/../../../../other/secret")


def an_absolute_name(made: Checkpoint) -> None:
    made.list(str(made.secret))


def the_kernel_s_links(made: Checkpoint) -> None:
    (made.folder / "root").symlink_to("/proc/self/root")
    made.list(f"root{made.secret}")


def a_fifo(made: Checkpoint) -> None:
    (made.folder / "weights").unlink()
    os.mkfifo(made.folder / "weights")


def another_size(made: Checkpoint) -> None:
    (made.folder / "weights").write_text("w")


def the_index_itself(made: Checkpoint) -> None:
    made.list("paceline.json")


ATTACKS = (
    a_link,
    a_linked_folder,
    a_linked_step,
    linked_checkpoints,
    a_linked_index,
    parents,
    parents_in_between,
    an_absolute_name,
    the_kernel_s_links,
    a_fifo,
    another_size,
    the_index_itself,
)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda each: each.__name__)
def test_no_file_of_others_is_copied(
    attack: Callable[[Checkpoint], None], checkpoint: Checkpoint, files: JobFiles
) -> None:
    attack(checkpoint)
    copy = CheckpointCopy("child", 4, checkpoint.digest)
    with pytest.raises((NotFoundError, UnavailableError)):
        files.copy_checkpoint("parent", copy)
    assert not checkpoint.copied.exists()
    left = checkpoint.copied.parent.rglob("*")
    assert not [each for each in left if each.is_file() and each.read_text() == SECRET]


def test_files_of_a_job_are_removed_without_following_links(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    (checkpoint.folder / "folder").symlink_to(checkpoint.secret.parent)
    (tmp_path / "workers" / "w").mkdir(parents=True)
    (tmp_path / "workers" / "w" / "parent").symlink_to(checkpoint.secret.parent)
    JobFiles(tmp_path).remove("parent")
    assert not checkpoint.folder.exists()
    assert checkpoint.secret.read_text() == SECRET
