"""No path of a job leads to files of others: by links, the kernel's file systems, URLs or races."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from paceline.data import JobData, RowShape
from paceline.data.job_data import EVERYWHERE
from paceline.errors import InvalidError
from paceline.platform.beneath import PRIVATE, ReadableFolders, mark_private, open_beneath
from paceline_harness.data import InProcess

SECRET = "plum"
SHAPE = RowShape(columns={"question": "q", "answer": "a"})
ROW = json.dumps({"q": SECRET, "a": SECRET}) + "\n"
OWN = json.dumps({"q": "1+1=", "a": "2"}) + "\n"


@dataclass
class Site:
    """A folder that jobs may read, an upload, and a run directory with files of all tenants."""

    shared: Path
    upload: Path
    run_dir: Path

    @property
    def secret(self) -> Path:
        return self.run_dir / "audit" / "secret.jsonl"

    def link(self, target: Path | str, name: str = "link.jsonl") -> str:
        """A link in the folder that jobs may read."""
        (self.shared / name).symlink_to(target)
        return str(self.shared / name)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    found = Site(tmp_path / "shared", tmp_path / "upload", tmp_path / "run")
    for each in (found.shared, found.upload, found.run_dir / "audit"):
        each.mkdir(parents=True)
    mark_private(found.run_dir)
    found.secret.write_text(ROW)
    (found.run_dir / "token").write_text(SECRET)
    (found.shared / "rows.jsonl").write_text(OWN)
    (found.upload / "rows.jsonl").write_text(OWN)
    return found


@pytest.fixture(params=["named", "everywhere"])
def data(request: pytest.FixtureRequest, site: Site, tmp_path: Path) -> JobData:
    """What `paceline up --data-folder` lets a job read, and what `paceline run` does."""
    allowed = EVERYWHERE if request.param == "everywhere" else (str(site.shared),)
    return InProcess(uploaded=str(site.upload), allowed=allowed, cache=str(tmp_path / "cache"))


Attack = Callable[[Site], str]
ATTACKS: dict[str, Attack] = {}


def attack(make: Attack) -> Attack:
    ATTACKS[make.__name__] = make
    return make


@attack
def itself(site: Site) -> str:
    return str(site.secret)


@attack
def its_folder(site: Site) -> str:
    return str(site.run_dir)


@attack
def a_pattern(site: Site) -> str:
    return str(site.run_dir / "audit" / "*.jsonl")


@attack
def a_name_that_is_not_there(site: Site) -> str:
    return str(site.run_dir / "audit" / "x.jsonl")


@attack
def parents(site: Site) -> str:
    return f"{site.shared}/../run/audit/secret.jsonl"


@attack
def slashes(site: Site) -> str:
    return f"//{str(site.secret).replace('/audit', '/./audit//')}"


@attack
def a_link(site: Site) -> str:
    return site.link(site.secret)


@attack
def a_relative_link(site: Site) -> str:
    return site.link("../run/audit/secret.jsonl")


@attack
def a_link_to_a_link(site: Site) -> str:
    site.link(site.secret, "first.jsonl")
    return site.link("first.jsonl")


@attack
def a_link_to_a_folder(site: Site) -> str:
    return f"{site.link(site.run_dir, 'folder')}/audit/secret.jsonl"


@attack
def a_pattern_in_a_linked_folder(site: Site) -> str:
    return f"{site.link(site.run_dir / 'audit', 'folder')}/s*.jsonl"


@attack
def a_link_that_a_pattern_finds(site: Site) -> str:
    site.link(site.secret)
    return str(site.shared / "l*.jsonl")


@attack
def a_link_in_a_folder(site: Site) -> str:
    site.link(site.secret)
    return str(site.shared)


@attack
def a_hard_link(site: Site) -> str:
    os.link(site.secret, site.shared / "hard.jsonl")
    return str(site.shared / "hard.jsonl")


@attack
def a_link_to_compressed_rows(site: Site) -> str:
    packed = site.run_dir / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress(ROW.encode()))
    return site.link(packed, "rows.jsonl.gz")


@attack
def a_link_to_a_table(site: Site) -> str:
    arrow = pytest.importorskip("pyarrow")
    write = pytest.importorskip("pyarrow.parquet").write_table
    write(arrow.Table.from_pylist([json.loads(ROW)]), site.run_dir / "rows.parquet")
    return site.link(site.run_dir / "rows.parquet", "rows.parquet")


@attack
def a_linked_list_of_splits(site: Site) -> str:
    (site.run_dir / "about").write_text(json.dumps({"splits": [SECRET]}))
    site.link(site.run_dir / "about", "dataset_dict.json")
    return str(site.shared)


@attack
def a_linked_shard(site: Site) -> str:
    site.link(site.secret)
    state = {"_data_files": [{"filename": "link.jsonl"}]}
    (site.shared / "state.json").write_text(json.dumps(state))
    return str(site.shared)


@attack
def a_link_out_of_the_upload(site: Site) -> str:
    (site.upload / "link.jsonl").symlink_to(site.secret)
    return "link.jsonl"


@attack
def parents_of_the_upload(site: Site) -> str:
    return "../run/audit/secret.jsonl"


@attack
def proc_root(site: Site) -> str:
    return f"/proc/self/root{site.secret}"


@attack
def proc_root_of_a_thread(site: Site) -> str:
    return f"/proc/{os.getpid()}/task/{os.getpid()}/root{site.secret}"


@attack
def proc_cwd(site: Site) -> str:
    return f"/proc/self/cwd/{os.path.relpath(site.secret)}"


@attack
def a_link_to_proc_environ(site: Site) -> str:
    return site.link("/proc/self/environ")


@attack
def sys_files(site: Site) -> str:
    return site.link("/sys/kernel/notes")


@attack
def stdin(site: Site) -> str:
    return site.link("/dev/stdin")


@attack
def shared_memory(site: Site) -> str:
    path = Path(f"/dev/shm/paceline-test-{os.getpid()}.jsonl")
    path.write_text(ROW)
    return str(path)


@attack
def a_url_of_a_file(site: Site) -> str:
    return f"file://{site.secret}"


@attack
def another_url_of_a_file(site: Site) -> str:
    return f"local://{site.secret}"


@attack
def a_chain(site: Site) -> str:
    return f"simplecache::file://{site.secret}"


@attack
def an_archive(site: Site) -> str:
    return f"zip://secret.jsonl::file://{site.secret}"


@attack
def an_allowed_prefix_that_chains(site: Site) -> str:
    return f"s3://bucket::file://{site.secret}"


@attack
def a_run_directory_of_an_earlier_release(site: Site) -> str:
    (site.run_dir / PRIVATE).unlink()
    (site.run_dir / "up.lock").touch()
    return str(site.secret)


@attack
def a_fifo(site: Site) -> str:
    os.mkfifo(site.shared / "fifo.jsonl")
    return str(site.shared / "fifo.jsonl")


@attack
def nul(site: Site) -> str:
    return f"{site.secret}\0.jsonl"


@pytest.fixture(autouse=True)
def no_shared_memory() -> Iterator[None]:
    yield
    Path(f"/dev/shm/paceline-test-{os.getpid()}.jsonl").unlink(missing_ok=True)


@pytest.mark.parametrize("name", ATTACKS)
def test_nothing_of_others_is_read_or_said(name: str, site: Site, data: JobData) -> None:
    path = ATTACKS[name](site)
    with pytest.raises(InvalidError) as refused:
        data.rows(path, SHAPE)
    assert SECRET not in refused.value.message
    about_others = refused.value.message.replace(path, "")
    assert "secret" not in about_others, "names in a folder of others"


@pytest.mark.parametrize("folder", ["/proc/self/fd", "/dev/fd"])
def test_open_descriptors_are_no_files(folder: str, site: Site, data: JobData) -> None:
    with site.secret.open() as opened, pytest.raises(InvalidError) as refused:
        data.rows(site.link(f"{folder}/{opened.fileno()}"), SHAPE)
    assert SECRET not in refused.value.message


def test_what_may_be_read_is(site: Site, data: JobData, tmp_path: Path) -> None:
    inside = site.link("rows.jsonl", "alias.jsonl")
    other = tmp_path / "shared" / "more" / "deep"
    other.mkdir(parents=True)
    (other / "rows.jsonl").write_text(OWN)
    for path in (inside, str(other), str(site.shared / "rows.*"), "", "rows.jsonl"):
        assert data.rows(path, SHAPE)[0]["question"] == "1+1="


def test_a_folder_that_the_operator_names_may_be_in_a_run_directory(
    site: Site, tmp_path: Path
) -> None:
    own = site.run_dir / "data"
    own.mkdir()
    (own / "rows.jsonl").write_text(OWN)
    data = InProcess(allowed=(str(own),), cache=str(tmp_path / "cache"))
    assert len(data.rows(str(own), SHAPE)) == 1
    with pytest.raises(InvalidError, match="may not read it"):
        data.rows(str(site.secret), SHAPE)


class Swapped(InProcess):
    """The file becomes a link between the check in the service and the process that reads."""

    def _ask(self, request: Mapping[str, Any], name: str) -> list[str]:
        path = Path(request["path"])
        path.unlink()
        path.symlink_to(path.parent.parent / "run" / "audit" / "secret.jsonl")
        return super()._ask(request, name)


@pytest.mark.parametrize("allowed", ["named", "everywhere"])
def test_a_link_put_there_before_the_process_reads(
    allowed: str, site: Site, tmp_path: Path
) -> None:
    folders = EVERYWHERE if allowed == "everywhere" else (str(site.shared),)
    data = Swapped(allowed=folders, cache=str(tmp_path / "cache"))
    with pytest.raises(InvalidError) as refused:
        data.rows(str(site.shared / "rows.jsonl"), SHAPE)
    assert SECRET not in refused.value.message


@pytest.mark.parametrize("part", ["folder", "file"])
def test_a_link_put_there_while_a_file_is_opened(part: str, site: Site) -> None:
    (site.shared / "audit").mkdir()
    (site.shared / "audit" / "secret.jsonl").write_text(OWN)

    def swap(folder: int) -> None:
        """Called before each component is opened; the first time changes what follows."""
        with suppress(FileNotFoundError):
            (site.shared / "audit" / "secret.jsonl").unlink()
            if part == "folder":
                (site.shared / "audit").rmdir()
                (site.shared / "audit").symlink_to(site.secret.parent)
            else:
                (site.shared / "audit" / "secret.jsonl").symlink_to(site.secret)

    with pytest.raises(OSError, match=r"Not a directory|symbolic links"):
        os.close(open_beneath(str(site.shared), "audit/secret.jsonl", check=swap))


def test_a_row_that_is_read_later_is_not_read_by_a_link(site: Site, tmp_path: Path) -> None:
    for at in range(200):  # more than are held open
        (site.shared / f"rows-{at:03}.jsonl").write_text(OWN)
    (site.shared / "rows.jsonl").unlink()
    data = InProcess(allowed=(str(site.shared),), cache=str(tmp_path / "cache"))
    rows = data.rows(str(site.shared), SHAPE)
    assert rows[199]["question"] == "1+1="
    last = site.shared / "rows-199.jsonl"
    last.rename(site.run_dir / "rows.jsonl")  # the very same rows
    last.symlink_to(site.run_dir / "rows.jsonl")
    with pytest.raises(InvalidError, match="may not read it"):
        rows[199]
    assert rows[0]["question"] == "1+1="


def test_a_path_may_not_leave_its_folder(site: Site) -> None:
    for path in ("../run/token", "/etc/passwd", "a/../../run/token"):
        with pytest.raises(OSError, match="leads outside"):
            open_beneath(str(site.shared), path)


def test_a_single_file_may_be_named(site: Site) -> None:
    folders = ReadableFolders((str(site.shared / "rows.jsonl"),))
    with folders.open(site.shared / "rows.jsonl", "rows") as opened:
        assert opened.read() == OWN.encode()
    with pytest.raises(InvalidError):
        folders.open(site.shared / "other.jsonl", "rows")
