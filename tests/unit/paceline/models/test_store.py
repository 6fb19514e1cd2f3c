"""Models of object stores, by fsspec: the store of these tests is a folder or memory."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from paceline.config.sections.model import ModelSettings, ModelSpec
from paceline.errors import ConfigError, UnavailableError
from paceline.models.resolve import ModelResolver
from paceline.models.weights import check_headers
from paceline_harness.models.folders import NO_TENSORS
from paceline_harness.patience import PATIENCE_S

FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors": NO_TENSORS,
    "a.py": b"1",
}
SETTINGS = ModelSettings(stores=("file", "memory"))
NAMES = ("config.json", "tokenizer.json", "chat_template.jinja")
CHILD = """
import sys
from pathlib import Path
from paceline.config.sections.model import ModelSettings, ModelSpec
from paceline.models.resolve import ModelResolver
_, url, digest, run_dir = sys.argv
resolver = ModelResolver(ModelSettings(stores=("file",)), run_dir=Path(run_dir))
print(resolver.folder(ModelSpec(path=url, digest=digest)))
"""


def resolver(run_dir: Path, settings: ModelSettings = SETTINGS) -> ModelResolver:
    return ModelResolver(settings, run_dir=run_dir)


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    place = f"{request.param}://{tmp_path}/{uuid.uuid4().hex}/model"
    fs, root = fsspec.url_to_fs(place)
    fs.makedirs(root)
    for name, data in FILES.items():
        fs.pipe_file(f"{root}/{name}", data)
    return place


def test_a_folder_is_pinned_and_cached_by_its_content(url: str, tmp_path: Path) -> None:
    found = resolver(tmp_path / "gateway").find(ModelSpec(path=url), NAMES, max_bytes=1000)
    assert found.files == {name: FILES[name] for name in ("config.json", "tokenizer.json")}
    assert len(found.spec.digest) == 64
    folder = resolver(tmp_path / "a").folder(found.spec)
    assert folder.name == found.spec.digest
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == {
        name: data for name, data in FILES.items() if name != "a.py"
    }
    fs, root = fsspec.url_to_fs(url)
    fs.pipe_file(f"{root}/model.safetensors", NO_TENSORS + b" ")
    assert resolver(tmp_path / "a").folder(found.spec) == folder  # what the job was accepted with
    with pytest.raises(ConfigError, match="has changed since the job was submitted"):
        resolver(tmp_path / "b").folder(found.spec)
    with pytest.raises(ConfigError, match=r"model\.digest: .* has other files"):
        resolver(tmp_path / "c").find(found.spec, NAMES, max_bytes=1000)


def test_a_download_says_how_much_has_arrived(url: str, tmp_path: Path) -> None:
    spec = resolver(tmp_path).find(ModelSpec(path=url), NAMES, max_bytes=1000).spec
    arrived: list[tuple[float, float]] = []
    resolver(tmp_path / "a").folder(spec, arrived=lambda done, of: arrived.append((done, of)))
    total = sum(len(data) for name, data in FILES.items() if name != "a.py")
    assert arrived[-1] == (total, total)
    assert arrived == sorted(arrived)
    assert len(arrived) == len(FILES) - 1


def test_what_a_dead_process_left_does_not_count(url: str, tmp_path: Path) -> None:
    spec = resolver(tmp_path).find(ModelSpec(path=url), NAMES, max_bytes=1000).spec
    draft = tmp_path / "cache/models/stores" / f".{spec.digest}.draft"
    draft.mkdir(parents=True)
    (draft / "model.safetensors").write_bytes(b"half")
    folder = resolver(tmp_path).folder(spec)
    assert (folder / "model.safetensors").read_bytes() == NO_TENSORS
    assert not draft.exists()


def test_processes_share_one_download(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name, data in FILES.items():
        (source / name).write_bytes(data)
    (source / "model.safetensors").write_bytes(os.urandom(1 << 22))
    url = f"file://{source}"
    spec = resolver(tmp_path / "run").find(ModelSpec(path=url), NAMES, max_bytes=1000).spec
    command = [sys.executable, "-c", CHILD, url, spec.digest, str(tmp_path / "run")]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    printed = {child.communicate(timeout=PATIENCE_S)[0].strip() for child in children}
    assert printed == {str(tmp_path / "run/cache/models/stores" / spec.digest)}
    got = Path(printed.pop(), "model.safetensors").read_bytes()
    assert got == (source / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("ftp://host/model", r"takes models from: file://, memory://"),
        ("simplecache::memory://m", r"takes models from"),
        ("memory://key:secret@bucket/m", r"credentials would be shown"),
        ("file:///no/such/model", r"does not exist"),
        ("memory:///no/such/model", r"does not exist"),
    ],
)
def test_what_is_no_model_is_refused(url: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        resolver(tmp_path).find(ModelSpec(path=url), NAMES, max_bytes=1000)
    assert "secret" not in caught.value.message


def test_a_store_without_its_package_names_it(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    settings = ModelSettings(stores=("gcs",))
    with pytest.raises(ConfigError, match=r"gcs:// needs gcsfs, which is not installed"):
        resolver(tmp_path, settings).find(ModelSpec(path="gcs://b/m"), NAMES, max_bytes=1000)


class Broken(MemoryFileSystem):
    """A store whose files come incompletely, or not at all."""

    protocol = "broken"
    refuses = True

    def cat_file(self, path: str, *args: Any, **kwargs: Any) -> bytes:
        if self.refuses:
            raise TimeoutError("the store is away")
        return super().cat_file(path, *args, **kwargs)

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        found: dict[str, Any] = super().info(path, **kwargs)
        return found | {"size": found["size"] + 7} if found["type"] == "file" else found

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        listed: Any = super().ls(path, detail=True)
        return [self.info(each["name"]) for each in listed]


def test_a_store_that_does_not_answer_can_be_tried_again(tmp_path: Path) -> None:
    fsspec.register_implementation("broken", Broken, clobber=True)
    fs, root = fsspec.url_to_fs(f"broken://{tmp_path}/model")
    fs.makedirs(root)
    for name, data in FILES.items():
        fs.pipe_file(f"{root}/{name}", data)
    spec = ModelSpec(path=f"broken://{tmp_path}/model")
    found = resolver(tmp_path, ModelSettings(stores=("broken",)))
    with pytest.raises(UnavailableError, match=r"cannot be read: TimeoutError: the store is away"):
        found.find(spec, NAMES, max_bytes=1000)
    Broken.refuses = False
    spec = found.find(spec, NAMES, max_bytes=1000).spec
    for _ in range(2):
        with pytest.raises(UnavailableError, match=r"config\.json arrived with 2 of 9 bytes"):
            found.folder(spec)
    assert [*(tmp_path / "cache/models/stores").iterdir()] == [
        tmp_path / "cache/models/stores" / f"{spec.digest}.lock"
    ]


def test_damaged_headers(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    head = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    whole = len(head).to_bytes(8, "little") + head + b"1234"
    path.write_bytes(whole)
    check_headers([path])
    for damaged in (
        whole[:-1],
        whole + b"1",
        whole[:20],
        b"",
        b"\xff" * 100,
        NO_TENSORS[:8] + b"[]",
    ):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"damaged|no safetensors"):
            check_headers([path])
