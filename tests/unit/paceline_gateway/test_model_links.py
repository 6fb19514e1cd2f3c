"""The small files of a model are kept with the job: a link in its folder shows no other file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline_gateway.submit.checks import read_model

SECRET = "plum"
HEADER = b"{}"
EMPTY = len(HEADER).to_bytes(8, "little") + HEADER


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "token").write_text(SECRET)
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(EMPTY)
    return folder


@pytest.mark.parametrize(
    "target", ["../token", "{}/token", "/proc/self/root{}/token", "/proc/self/environ"]
)
def test_a_link_to_another_file_is_refused(target: str, model: Path) -> None:
    (model / "chat_template.jinja").symlink_to(target.format(model.parent))
    with pytest.raises(ConfigError, match=r"chat_template\.jinja: is a link to outside") as refused:
        read_model(model)
    assert SECRET not in refused.value.message


def test_links_inside_of_the_folder_and_of_the_hub_s_cache_are_read(
    model: Path, tmp_path: Path
) -> None:
    (model / "template").write_text("{{ messages }}")
    (model / "chat_template.jinja").symlink_to("template")
    assert read_model(model)["chat_template.jinja"] == b"{{ messages }}"
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "c0ffee", tmp_path / "models--a--b"
    snapshot.mkdir(parents=True)
    (blobs / "blobs").mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (model / name).rename(blobs / "blobs" / name)
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    assert read_model(snapshot)["config.json"] == b"{}"
    (tmp_path / "link").symlink_to(snapshot)
    assert read_model(tmp_path / "link")["config.json"] == b"{}"


def test_a_folder_of_blobs_that_is_a_link_is_none_of_the_hub_s_cache(
    model: Path, tmp_path: Path
) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "c0ffee"
    snapshot.parent.mkdir(parents=True)
    (snapshot.parent.parent / "blobs").symlink_to(tmp_path)
    model.rename(snapshot)
    (snapshot / "chat_template.jinja").symlink_to("../../blobs/token")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja: is a link to outside"):
        read_model(snapshot)


@pytest.mark.parametrize("root", ["/proc/self/root", "/proc/self/cwd/"])
def test_a_folder_is_found_by_its_path_and_not_by_links_of_the_kernel(
    root: str, model: Path
) -> None:
    """These would resolve links of another root folder in this one's."""
    path = Path(f"{root}{os.path.relpath(model) if root.endswith('/') else model}")
    assert json.loads(read_model(path)["config.json"]) == {}
    (model / "chat_template.jinja").symlink_to("/etc/passwd")
    with pytest.raises(ConfigError, match="is a link to outside"):
        read_model(path)


def test_shared_memory_is_no_model(model: Path) -> None:
    folder = Path(f"/dev/shm/paceline-test-{os.getpid()}")
    model.parent.joinpath("copy").symlink_to(folder)
    folder.mkdir()
    try:
        for each in model.iterdir():
            (folder / each.name).write_bytes(each.read_bytes())
        for path in (folder, model.parent / "copy"):
            with pytest.raises(ConfigError, match="a folder on a disk is needed"):
                read_model(path)
    finally:
        for each in folder.iterdir():
            each.unlink()
        folder.rmdir()
