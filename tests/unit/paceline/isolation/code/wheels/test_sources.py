"""Where wheels come from: settings of the installation, and pip's files and variables."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.config.packages import PackageSettings
from paceline.isolation.code.wheels.sources import (
    PYPI,
    SourcesError,
    WheelSources,
    without_credentials,
)


def sources(environment: dict[str, str], **settings: object) -> WheelSources:
    """With these variables, and no file of this machine unless they name one."""
    named = {"PIP_CONFIG_FILE": os.devnull} | environment
    return WheelSources.read(PackageSettings.model_validate(settings), named)


def test_without_any_configuration_it_is_pypi() -> None:
    assert sources({}) == WheelSources(index_urls=(PYPI,))


def test_settings_of_the_installation_win_over_those_of_pip() -> None:
    environment = {"PIP_INDEX_URL": "https://pip/simple", "PIP_EXTRA_INDEX_URL": "https://more"}
    assert sources(environment).index_urls == ("https://pip/simple", "https://more")
    found = sources(environment | {"PIP_NO_INDEX": "1"}, index_url="https://own/simple/")
    assert found.index_urls == ("https://own/simple", "https://more")


def test_no_index_of_the_installation_leaves_only_the_wheels_of_the_code(tmp_path: Path) -> None:
    found = sources({"PIP_FIND_LINKS": str(tmp_path)}, no_index=True)
    assert found == WheelSources()


def test_no_index_of_pip_leaves_its_folders(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    found = sources({"PIP_NO_INDEX": "yes", "PIP_FIND_LINKS": f"{tmp_path} {gone} https://a/b"})
    assert (found.index_urls, found.find_links) == ((), (str(tmp_path), "https://a/b"))


def test_files_of_pip_are_read_as_pip_reads_them(tmp_path: Path) -> None:
    system, home, chosen = tmp_path / "etc", tmp_path / "home", tmp_path / "chosen.conf"
    (system / "pip").mkdir(parents=True)
    (system / "pip" / "pip.conf").write_text(
        "[global]\nindex-url = https://system/simple\ntrusted-host = a\n  b\nproxy = http://p:1\n"
    )
    (home / ".config" / "pip").mkdir(parents=True)
    (home / ".config" / "pip" / "pip.conf").write_text(
        "[global]\nindex_url = https://user/simple\nno-index =\n"
        "[install]\nextra-index-url =\n  https://one\n  https://two\n[list]\nindex-url = https://no\n"
    )
    variables = {"XDG_CONFIG_DIRS": str(system), "HOME": str(home), "PIP_CONFIG_FILE": ""}
    found = sources(variables)
    assert found.index_urls == ("https://user/simple", "https://one", "https://two")
    assert (found.trusted_hosts, found.proxy) == (("a", "b"), "http://p:1")
    chosen.write_text("[global]\nindex-url = https://chosen/simple\ncert = /ca.pem\n")
    found = sources(variables | {"PIP_CONFIG_FILE": str(chosen)})
    assert found.index_urls == ("https://chosen/simple",)  # and not those of the user
    assert found.certificates == "/ca.pem"


@pytest.mark.parametrize("text", ["[global", "index-url = x", "[global]\n\xff"])
def test_a_file_of_pip_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "pip.conf"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(SourcesError, match=r"pip\.conf cannot be read"):
        sources({"PIP_CONFIG_FILE": str(path)})


def test_constraints_of_pip_hold(tmp_path: Path) -> None:
    path = tmp_path / "constraints.txt"
    path.write_text("# ours\nNumPy<3  # newer ones break\n\n")
    assert sources({"PIP_CONSTRAINT": str(path)}).constraints == ("NumPy<3",)
    for wrong in ("-r other.txt", "evil @ https://u:p@host/evil.whl"):
        path.write_text(wrong)
        with pytest.raises(SourcesError, match=r"option constraint") as refused:
            sources({"PIP_CONSTRAINT": str(path)})
        assert "u:p" not in refused.value.message


def test_folders_are_what_may_be_read(tmp_path: Path) -> None:
    index, wheels = tmp_path / "index" / "simple", tmp_path / "wheels of ours"
    found = WheelSources(
        index_urls=(index.as_uri(), "https://a/simple"),
        find_links=(wheels.as_uri(), str(wheels), "https://a/b"),
    )
    assert found.folders() == [index.parent, wheels, wheels]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://user:pass@host/simple", "https://***@host/simple"),
        ("no https://a/b@c nor a@b, but ftp://x@y", "no https://a/b@c nor a@b, but ftp://***@y"),
    ],
)
def test_credentials_are_not_shown(text: str, shown: str) -> None:
    assert without_credentials(text) == shown
