"""Where wheels come from: the installation's settings, and pip's configuration of this machine."""

from __future__ import annotations

import configparser
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from packaging.requirements import InvalidRequirement, Requirement

from paceline.errors import UnavailableError

if TYPE_CHECKING:
    # Each process that fetches or unpacks would import all kinds of plug-ins with it.
    from paceline.config.packages import PackageSettings

PYPI = "https://pypi.org/simple"
_SECTIONS = ("global", "install")  # the later one wins, and variables win over both
_TRUE = frozenset(("1", "on", "t", "true", "y", "yes"))
_COMMENT = re.compile(r"(^|\s)#.*$")
_CREDENTIALS = re.compile(r"//[^/\s]*@")  # a password may have `@` in it
CERTIFICATES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")


class SourcesError(UnavailableError):
    """pip's configuration of this machine cannot be used."""


@dataclass(frozen=True, slots=True)
class WheelSources:
    """Indexes, folders and pages with wheels, and how to reach them."""

    index_urls: tuple[str, ...] = field(default=(), repr=False)  # may have credentials
    find_links: tuple[str, ...] = field(default=(), repr=False)  # folders, pages or wheels
    trusted_hosts: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()  # of the operator, as requirements
    certificates: str = ""  # a file; empty: those of certifi
    client_certificate: str = ""
    proxy: str = field(default="", repr=False)

    @classmethod
    def read(cls, settings: PackageSettings, environment: Mapping[str, str]) -> WheelSources:
        """Settings of the installation first, then `PIP_*` and the files that pip reads.

        Raises:
            SourcesError: a file of pip cannot be read.
        """
        pip = _pip_configuration(environment)
        constraints = tuple(_constraints(pip.get("constraint", "")))
        if settings.no_index:  # nothing but the wheels of the code
            return cls(constraints=constraints)
        no_index = pip.get("no-index", "").lower() in _TRUE and not settings.index_url
        first = settings.index_url or pip.get("index-url") or PYPI
        indexes = () if no_index else (first, *pip.get("extra-index-url", "").split())
        set_in = next((environment[name] for name in CERTIFICATES if environment.get(name)), "")
        return cls(
            index_urls=tuple(dict.fromkeys(each.rstrip("/") for each in indexes)),
            find_links=tuple(_existing(pip.get("find-links", ""))),
            trusted_hosts=tuple(pip.get("trusted-host", "").split()),
            constraints=constraints,
            certificates=pip.get("cert") or set_in,
            client_certificate=pip.get("client-cert", ""),
            proxy=pip.get("proxy", ""),
        )

    def folders(self) -> list[Path]:
        """Folders of this machine in which there may be wheels.

        The pages of an index in a folder link to files beside it.
        """
        paths: list[Path] = []
        for url in (*self.index_urls, *self.find_links):
            parts = urlsplit(url)
            if parts.scheme == "file" or "://" not in url:
                path = Path(unquote(parts.path) if parts.scheme else url).absolute()
                is_index = url in self.index_urls and path.parent != Path("/")
                paths.append(path.parent if is_index else path)
        return paths


def without_credentials(text: str) -> str:
    """The text with `***` for the user and password of every address in it."""
    return _CREDENTIALS.sub("//***@", text)


def _pip_configuration(environment: Mapping[str, str]) -> dict[str, str]:
    """What `pip config list` shows of `pip install`: https://pip.pypa.io/en/stable/topics/configuration/."""
    files = [_parsed(path) for path in _pip_files(environment)]
    merged: dict[str, str] = {}
    for section in _SECTIONS:
        for file in files:
            if file.has_section(section):
                merged |= {_option(key): value for key, value in file.items(section) if value}
    for name, value in environment.items():
        if name.startswith("PIP_") and value:
            merged[_option(name.removeprefix("PIP_"))] = value
    return merged


def _pip_files(environment: Mapping[str, str]) -> Iterator[Path]:
    chosen = environment.get("PIP_CONFIG_FILE", "")
    if chosen == os.devnull:
        return
    for folder in environment.get("XDG_CONFIG_DIRS", "").split(os.pathsep):
        yield Path(folder or "/etc/xdg", "pip", "pip.conf")
    yield Path("/etc/pip.conf")
    home = environment.get("HOME", "")
    if home and not (chosen and Path(chosen).exists()):
        yield Path(home, ".pip", "pip.conf")
        yield Path(environment.get("XDG_CONFIG_HOME") or Path(home, ".config"), "pip", "pip.conf")
    yield Path(sys.prefix, "pip.conf")
    if chosen:
        yield Path(chosen)


def _parsed(path: Path) -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser()
    try:
        parser.read(path)
    except (configparser.Error, OSError, UnicodeDecodeError) as error:
        reason = without_credentials(str(error).partition("\n")[0])
        raise SourcesError(f"pip's configuration {path} cannot be read: {reason}") from None
    return parser


def _option(key: str) -> str:
    return key.lower().replace("_", "-").removeprefix("--")


def _existing(places: str) -> Iterator[str]:
    for place in places.split():
        path = Path(place).expanduser()
        if "://" in place:
            yield place
        elif path.exists():  # pip only warns of others
            yield str(path.absolute())


def _constraints(files: str) -> Iterator[str]:
    for name in files.split():
        path = Path(name.removeprefix("file://")).expanduser()
        try:
            lines = [_COMMENT.sub("", line).strip() for line in path.read_text().splitlines()]
            parsed = [Requirement(line) for line in lines if line]
        except (OSError, UnicodeDecodeError, InvalidRequirement) as error:
            reason = str(error).partition("\n")[0]
            raise SourcesError(
                f"pip's option constraint: {without_credentials(name)}: {reason}; a file with one "
                "name and its versions in each line is needed"
            ) from None
        if linked := next((each for each in parsed if each.url), None):
            raise SourcesError(f"pip's option constraint: {path}: {linked.name} has an address")
        yield from map(str, parsed)
