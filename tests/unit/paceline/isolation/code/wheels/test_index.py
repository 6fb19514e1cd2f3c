"""What is read of an index: pages of both kinds, metadata beside wheels, folders, credentials."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from unearth import Link

from paceline.isolation.code.wheels.errors import FetchError
from paceline.isolation.code.wheels.index import WheelIndex
from paceline.isolation.code.wheels.sources import WheelSources
from paceline_harness.packages.package_index import PackageIndex, serving
from paceline_harness.packages.wheels import write_wheel


@pytest.fixture
def served(tmp_path: Path) -> Iterator[PackageIndex]:
    with serving(PackageIndex(tmp_path / "files")) as index:
        yield index


def link_of(index: WheelIndex, project: str) -> Link:
    """The best wheel of a project."""
    place = index.offers(project)[0].place
    assert isinstance(place, Link)
    return place


@pytest.mark.parametrize("speaks_json", [True, False], ids=["json", "html"])
def test_wheels_that_fit_are_listed_with_what_the_page_says_of_them(
    served: PackageIndex, speaks_json: bool
) -> None:
    served.speaks_json = speaks_json
    for version in ("1.0", "2.0", "3.0"):
        write_wheel(served.folder, "leaf", version)
    other = served.folder / "leaf-4.0-cp27-cp27m-win32.whl"
    write_wheel(served.folder, "leaf", "4.0").rename(other)
    (served.folder / "leaf-5.0.tar.gz").write_bytes(b"")
    served.yanked = {"leaf-2.0-py3-none-any.whl"}
    served.requires_python = {"leaf-3.0-py3-none-any.whl": "<3"}
    found = WheelIndex(WheelSources(index_urls=(served.url,))).offers("leaf")
    assert [(str(each.name.version), each.is_yanked) for each in found] == [
        ("1.0", False),
        ("2.0", True),
    ]
    assert all(len(each.hashes["sha256"]) == 64 for each in found)


@pytest.mark.parametrize("speaks_json", [True, False], ids=["json", "html"])
def test_metadata_beside_a_wheel_spares_its_download_and_has_a_hash(
    served: PackageIndex, speaks_json: bool
) -> None:
    served.speaks_json, served.has_metadata = speaks_json, True
    path = write_wheel(served.folder, "leaf")
    beside = path.with_name(f"{path.name}.metadata")
    beside.write_text("Name: leaf")
    index = WheelIndex(WheelSources(index_urls=(served.url,)))
    link = link_of(index, "leaf")
    assert index.metadata(link) == b"Name: leaf"
    assert f"/files/{path.name}" not in served.asked
    beside.write_text("Name: other")
    with pytest.raises(FetchError, match=r"leaf-1\.0.*\.metadata: its sha256 is"):
        index.metadata(link)


def test_a_wheel_with_another_hash_or_too_many_bytes_is_refused(served: PackageIndex) -> None:
    path = write_wheel(served.folder, "leaf")
    index = WheelIndex(WheelSources(index_urls=(served.url,)))
    into = io.BytesIO()
    index.download(link_of(index, "leaf"), into, most_bytes=1 << 20)
    assert into.getvalue() == path.read_bytes()
    with pytest.raises(FetchError, match="more than 10 bytes"):
        index.download(link_of(index, "leaf"), io.BytesIO(), most_bytes=10)
    served.wrong_hash = {path.name}
    with pytest.raises(FetchError, match="but the index says"):
        index.download(link_of(index, "leaf"), io.BytesIO(), most_bytes=1 << 20)


def test_one_index_that_is_away_leaves_the_others(served: PackageIndex, tmp_path: Path) -> None:
    write_wheel(served.folder, "leaf")
    write_wheel(tmp_path / "links", "twig")
    away = "http://user:password@127.0.0.1:9/simple"
    index = WheelIndex(
        WheelSources(index_urls=(away, served.url), find_links=(str(tmp_path / "links"),))
    )
    assert len(index.offers("leaf")) == len(index.offers("twig")) == 1
    (problem,) = {line.replace("twig", "leaf") for line in index.problems()}
    assert "127.0.0.1:9/simple/leaf" in problem
    assert "password" not in problem


def test_credentials_go_to_their_index_and_to_no_other(
    served: PackageIndex, tmp_path: Path
) -> None:
    served.credentials = "user:password"
    write_wheel(served.folder, "leaf")
    index = WheelIndex(WheelSources(index_urls=(served.private_url,)))
    index.download(link_of(index, "leaf"), io.BytesIO(), most_bytes=1 << 20)
    with serving(PackageIndex(tmp_path / "other", credentials="user:password")) as other:
        write_wheel(other.folder, "twig")
        both = WheelIndex(WheelSources(index_urls=(served.private_url, other.url)))
        assert both.offers("twig") == []
        assert "401" in "".join(both.problems())


def test_pages_of_a_folder_link_to_files_beside_it_and_nowhere_else(tmp_path: Path) -> None:
    inside = write_wheel(tmp_path / "mirror" / "files", "leaf")
    outside = write_wheel(tmp_path / "elsewhere", "leaf", "2.0")
    page = tmp_path / "mirror" / "simple" / "leaf" / "index.html"
    page.parent.mkdir(parents=True)
    page.write_text(f'<a href="../../files/{inside.name}"></a><a href="{outside.as_uri()}"></a>')
    index = WheelIndex(WheelSources(index_urls=((tmp_path / "mirror" / "simple").as_uri(),)))
    assert [each.name.file for each in index.offers("leaf")] == [inside.name]
    assert index.offers("missing") == []


def test_pages_over_http_lead_to_no_file_and_to_no_server_without_tls(
    served: PackageIndex, tmp_path: Path
) -> None:
    files = [
        f"file://{tmp_path}/leaf-1.0-py3-none-any.whl",
        "git+https://host/leaf-1.1-py3-none-any.whl",
        "http://elsewhere.example/leaf-1.2-py3-none-any.whl",
        "ftp://elsewhere.example/leaf-1.3-py3-none-any.whl",
        "https://elsewhere.example/leaf-1.4-py3-none-any.whl",
    ]
    page = "".join(f'<a href="{each}"></a>' for each in files).encode()
    served.page = page
    write_wheel(served.folder, "leaf")
    found = WheelIndex(WheelSources(index_urls=(served.url,))).offers("leaf")
    assert [str(each.name.version) for each in found] == ["1.4"]


def test_without_sources_there_is_nothing() -> None:
    assert WheelIndex(WheelSources()).offers("leaf") == []
