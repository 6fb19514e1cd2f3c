"""Wheels that indexes, pages and folders of the operator offer, through `unearth`."""

from __future__ import annotations

import hashlib
import logging
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import httpx
import unearth.auth
from unearth import Link, PackageFinder
from unearth.auth import MultiDomainBasicAuth
from unearth.collector import is_secure_origin
from unearth.fetchers import Fetcher, PyPIClient

from paceline.isolation.code.wheels.errors import FetchError
from paceline.isolation.code.wheels.sources import WheelSources, without_credentials
from paceline.isolation.code.wheels.wheel import MOST_METADATA_BYTES, WheelName

_TIMEOUT_S = 15.0
_SHOWN_PROBLEMS = 3
_BLOCK_BYTES = 1 << 20
_AS_IT_IS = {"Accept-Encoding": "identity"}  # a compressed wheel would have another digest
_HASHES = ("sha512", "sha384", "sha256", "sha224", "sha1", "md5")  # the strongest is compared


@dataclass(frozen=True, slots=True)
class WheelOffer:
    """A wheel that can be had: a file of the job's code, or a link of an index."""

    name: WheelName
    place: Path | Link
    hashes: Mapping[str, str]  # by algorithm, as far as they are known
    is_yanked: bool = False


class WheelIndex:
    """All places that `WheelSources` names; nothing if it names none."""

    def __init__(self, sources: WheelSources) -> None:
        self._problems = _Problems()
        self._folders = [path.resolve() for path in sources.folders()]
        self._client: Fetcher | None = None
        self._finder: PackageFinder | None = None
        if sources.index_urls or sources.find_links:
            self._client = _client(sources, self._check_request)
            self._finder = PackageFinder(
                self._client,
                index_urls=sources.index_urls,
                find_links=sources.find_links,
                only_binary=[":all:"],
            )

    def problems(self) -> list[str]:
        """What was wrong with the last places that could not be read."""
        return self._problems.last(_SHOWN_PROBLEMS)

    def offers(self, project: str) -> list[WheelOffer]:
        """All wheels of a project that fit this interpreter, the best first."""
        if self._finder is None or self._client is None:
            return []
        links = [each.link for each in self._finder.find_all_packages(project, allow_yanked=True)]
        return [
            WheelOffer(WheelName.parse(link.filename), link, _hashes(link), link.is_yanked)
            for link in links
            if self._may_be_read(link, self._client)
        ]

    def metadata(self, link: Link) -> bytes | None:
        """The `METADATA` of a wheel as the index has it beside it (PEP 658); None: it has not.

        Raises:
            FetchError: it cannot be had.
        """
        beside = link.dist_info_link
        if beside is None:
            return None
        content = bytearray()
        self._copy(beside, content.extend, most_bytes=MOST_METADATA_BYTES)
        if isinstance(link.dist_info_metadata, dict):
            for name in set(link.dist_info_metadata) & set(_HASHES):
                found = hashlib.new(name, content).hexdigest()
                _check_digest(beside, name, found, link.dist_info_metadata[name])
        return bytes(content)

    def download(self, link: Link, into: IO[bytes], *, most_bytes: int) -> None:
        """Write a wheel to a file, and compare it with the hash in its link.

        Raises:
            FetchError: it cannot be had, is too large or has another hash.
        """
        expected = _hashes(link)
        strongest = [name for name in _HASHES if name in expected][:1]
        hashers = {name: hashlib.new(name) for name in strongest}

        def write(block: bytes) -> None:
            into.write(block)
            for hasher in hashers.values():
                hasher.update(block)

        self._copy(link, write, most_bytes=most_bytes)
        for name, hasher in hashers.items():
            _check_digest(link, name, hasher.hexdigest(), expected[name])

    def _copy(self, link: Link, write: Callable[[bytes], object], *, most_bytes: int) -> None:
        assert self._client is not None  # who else has made the link?
        left = most_bytes
        try:
            with self._client.get_stream(link.normalized, headers=_AS_IT_IS) as response:
                response.raise_for_status()
                for block in response.iter_bytes(_BLOCK_BYTES):
                    left -= len(block)
                    if left < 0:
                        raise FetchError(f"{link.filename}: more than {most_bytes} bytes")
                    write(block)
        except (httpx.HTTPError, OSError) as error:
            reason = without_credentials(str(error)) or type(error).__name__
            raise FetchError(f"{link.redacted}: {reason}") from None

    def _check_request(self, request: httpx.Request) -> None:
        """Follow no redirection to where no link may lead."""
        link = Link(str(request.url))
        if self._client is not None and not self._may_be_read(link, self._client):
            raise httpx.RequestError(f"leads to {link.redacted}, which is not trusted")

    def _may_be_read(self, link: Link, client: Fetcher) -> bool:
        """Whether a link leads to a server over TLS or one that is trusted, or to our folders."""
        if link.is_file:
            path = link.file_path.resolve()
            return any(path.is_relative_to(folder) for folder in self._folders)
        return not link.is_vcs and is_secure_origin(client, link)


class _Client(PyPIClient):
    """Answers for servers that cannot be reached, so that other ones are asked."""

    def get(self, url: str, **options: object) -> httpx.Response:  # pyright: ignore
        """As the method of `httpx`; nothing that `unearth` knows of is raised."""
        try:
            return super().get(url, **options)  # pyright: ignore
        except (httpx.HTTPError, OSError) as error:
            reason = str(error) or type(error).__name__
            return httpx.Response(
                503,
                extensions={"reason_phrase": reason.encode("ascii", "replace")},
                request=httpx.Request("GET", url),
            )


class _Problems(logging.Handler):
    """What `unearth` says of places that it cannot read; a project may be in one of several."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: dict[str, None] = {}
        logger = logging.getLogger("unearth")
        logger.addHandler(self)
        logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line, unless it says that an index has no such project."""
        line = without_credentials(record.getMessage())
        if "Client Error(404)" not in line:
            self._lines[line] = None

    def last(self, most: int) -> list[str]:
        """The last different lines, `most` of them."""
        return [*self._lines][-most:]


def _client(sources: WheelSources, check: Callable[[httpx.Request], None]) -> Fetcher:
    """`check` raises what `httpx` does for a request that is not to be made."""
    unearth.auth.KEYRING_DISABLED = True  # a program of another package
    verify: ssl.SSLContext | bool = True
    if sources.certificates or sources.client_certificate:
        verify = ssl.create_default_context(cafile=sources.certificates or None)
        if sources.client_certificate:
            verify.load_cert_chain(sources.client_certificate)
    client = _Client(
        trusted_hosts=sources.trusted_hosts,
        verify=verify,
        timeout=_TIMEOUT_S,
        follow_redirects=True,
        event_hooks={"request": [check]},
        proxy=sources.proxy or None,
    )
    urls = [each for each in (*sources.index_urls, *sources.find_links) if "://" in each]
    client.auth = MultiDomainBasicAuth(prompting=False, index_urls=urls)
    return cast(Fetcher, client)


def _hashes(link: Link) -> dict[str, str]:
    return {name: values[0].lower() for name, values in (link.hash_option or {}).items()}


def _check_digest(link: Link, name: str, found: str, expected: str) -> None:
    if found != expected.lower():
        raise FetchError(
            f"{link.filename}: its {name} is {found}, but the index says {expected.lower()[:128]}"
        )
