"""Fetches wheels: handles a `FetchRequest` with a `WheelsReply`. Runs nothing of a package.

It reads certificates, pip's folders of wheels and those of the job, and writes only to its folder.
"""

from __future__ import annotations

import hashlib
import itertools
import mimetypes
import os
import re
import shutil
import ssl
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.platform.program import importing, leave

with importing():
    from packaging.requirements import Requirement
    from packaging.tags import sys_tags
    from packaging.utils import canonicalize_name
    from unearth import Link

    from paceline.isolation.child import ServedCall, serve, told
    from paceline.isolation.code.wheels.errors import FetchError
    from paceline.isolation.code.wheels.index import WheelIndex, WheelOffer
    from paceline.isolation.code.wheels.messages import (
        FETCH,
        HANDLE,
        MOST_ANSWER_BYTES,
        REPLY,
        FetchRequest,
        LocalWheel,
        WheelsReply,
    )
    from paceline.isolation.code.wheels.resolve import (
        CONSTRAINTS,
        REQUIREMENTS,
        Ask,
        Hashes,
        resolve,
    )
    from paceline.isolation.code.wheels.sources import (
        CERTIFICATES,
        WheelSources,
        without_credentials,
    )
    from paceline.isolation.code.wheels.wheel import (
        MetadataError,
        WheelMetadata,
        WheelName,
        read_wheel,
    )

_HASH = re.compile(r"\s--hash=(\S+)")
# Names of hosts, and certificates where distributions have them; links among them are followed.
_OF_THE_NETWORK = (
    *("/etc/resolv.conf", "/etc/hosts", "/etc/host.conf", "/etc/nsswitch.conf", "/etc/gai.conf"),
    *("/etc/services", "/etc/ssl/certs", "/etc/ssl/openssl.cnf", "/etc/ssl/cert.pem", "/etc/pki"),
    *("/usr/share/ca-certificates", "/usr/local/share/ca-certificates", "/etc/ca-certificates"),
)


class _FetchedWheels:
    """The job's own wheels, and those of the index; what it fetches is written to a folder."""

    def __init__(self, request: FetchRequest) -> None:
        self._index = WheelIndex(request.sources)
        self._into, self._most_bytes = request.into, request.most_bytes
        self._own = _own_offers(request.own)
        self._numbers = itertools.count()  # of folders
        self._offers: dict[str, list[WheelOffer]] = {}
        self._metadata: dict[Path | Link, WheelMetadata | MetadataError] = {}
        self._here: dict[Path | Link, tuple[Path, WheelMetadata, int]] = {}

    def offers(self, project: str) -> Sequence[WheelOffer]:
        """Of a project; the code's own ones come first."""
        if project not in self._offers:
            own = [each for each in self._own if each.name.project == project]
            self._offers[project] = own + self._index.offers(project)
        return self._offers[project]

    def metadata(self, offer: WheelOffer) -> WheelMetadata:
        """What a wheel needs, without fetching it if the index has that beside it."""
        if offer.place not in self._metadata:
            try:
                self._metadata[offer.place] = self._read(offer)
            except MetadataError as error:
                self._metadata[offer.place] = error
        known = self._metadata[offer.place]
        if isinstance(known, MetadataError):
            raise known
        return known

    def take(self, offers: Sequence[WheelOffer], hashes: Hashes) -> Iterator[LocalWheel]:
        """Fetch those that were chosen, and compare them with all that was said of them."""
        left = self._most_bytes
        for offer in offers:
            path, metadata, num_bytes = self._fetched(offer)
            left -= num_bytes
            if left < 0:
                raise FetchError(f"more than {self._most_bytes} bytes of packages")
            if metadata != self.metadata(offer):
                raise FetchError(f"{offer.name.file}: the index says that it needs something else")
            _check_hashes(path, hashes.get(offer.name.project, frozenset()))
            yield LocalWheel(path, _digest("sha256", path))

    def problems(self) -> list[str]:
        """Of places that could not be read."""
        return self._index.problems()

    def _read(self, offer: WheelOffer) -> WheelMetadata:
        beside = self._index.metadata(offer.place) if isinstance(offer.place, Link) else None
        if beside is None:
            return self._fetched(offer)[1]
        return WheelMetadata.parse(beside, offer.name)

    def _fetched(self, offer: WheelOffer) -> tuple[Path, WheelMetadata, int]:
        """The wheel here, what it needs, and its unpacked size."""
        if offer.place not in self._here:
            folder = self._into / str(next(self._numbers))
            folder.mkdir()
            path = folder / offer.name.file
            if isinstance(offer.place, Path):
                if offer.place.stat().st_size > self._most_bytes:
                    raise FetchError(f"{offer.name.file}: more than {self._most_bytes} bytes")
                shutil.copyfile(offer.place, path, follow_symlinks=False)
                if _digest("sha256", path) != offer.hashes["sha256"]:
                    raise FetchError(f"{offer.name.file} has changed")
            else:
                with path.open("wb") as file:
                    self._index.download(offer.place, file, most_bytes=self._most_bytes)
            found = read_wheel(path, offer.name, most_bytes=self._most_bytes)
            self._here[offer.place] = path, *found
        return self._here[offer.place]


def fetch(request: FetchRequest) -> WheelsReply:
    """Resolve the requirements and fetch what they need.

    Raises:
        FetchError: they cannot be met; says why.
        WheelError: a wheel is refused.
    """
    asks: list[Ask] = []
    hashes: dict[str, frozenset[str]] = {}
    for line in request.requirements:
        asks.append(Ask(Requirement(_HASH.sub("", line)), REQUIREMENTS))
        allowed = frozenset(_HASH.findall(line))
        if allowed:
            hashes[asks[-1].project] = hashes.get(asks[-1].project, frozenset()) | allowed
    of_projects: Hashes = {canonicalize_name(name): each for name, each in hashes.items()}
    constraints = [Ask(Requirement(each), CONSTRAINTS) for each in request.constraints]
    shelf = _FetchedWheels(request)
    try:
        offers = resolve(asks, constraints=constraints, hashes=of_projects, shelf=shelf)
        return WheelsReply(tuple(shelf.take(offers, of_projects)))
    except FetchError as error:
        lines = [*shelf.problems(), error.message]
        raise FetchError("; ".join(dict.fromkeys(lines))) from None


def main() -> None:
    """Serve one request."""
    serve({HANDLE: _handle}, words=_words, most_bytes=MOST_ANSWER_BYTES)


def _handle(call: ServedCall) -> dict[str, Any]:
    request = FETCH.validate_python(call.fields["request"])
    paths = [*_of_the_network(request.sources), *(each.path for each in request.own)]
    mimetypes.init()  # unearth asks it about files; it reads some of the system
    request.hold.apply(readable=paths, changed=request.into, has_network=True)
    return REPLY.dump_python(fetch(request), mode="json")


def _words(error: BaseException) -> str:
    if isinstance(error, OSError):
        return f"wheels cannot be written here: {error.strerror}"
    return without_credentials(told(error))


def _own_offers(wheels: Sequence[LocalWheel]) -> list[WheelOffer]:
    """The job's wheels that this interpreter can import, the best of each version first."""
    ranks = {tag: rank for rank, tag in enumerate(sys_tags())}
    offers: list[tuple[int, WheelOffer]] = []
    for each in wheels:
        name = WheelName.parse(each.path.name)
        fitting = [ranks[tag] for tag in name.tags if tag in ranks]
        if fitting:
            offers.append((min(fitting), WheelOffer(name, each.path, {"sha256": each.digest})))
    offers.sort(key=lambda pair: pair[1].name.build, reverse=True)
    return [offer for _, offer in sorted(offers, key=lambda pair: pair[0])]


def _check_hashes(path: Path, allowed: frozenset[str]) -> None:
    """Compare a file with the hashes of `requirements.txt`, if there are any."""
    if not allowed:
        return
    algorithms = sorted({each.partition(":")[0] for each in allowed})
    found = [f"{name}:{_digest(name, path)}" for name in algorithms]
    if not allowed & set(found):
        raise FetchError(f"{path.name}: its hash is {found[0]}, which is not in {REQUIREMENTS}")


def _digest(algorithm: str, path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def _of_the_network(sources: WheelSources) -> Iterator[Path]:
    """What is read to reach indexes, and their folders."""
    yield from map(Path, _OF_THE_NETWORK)
    defaults = ssl.get_default_verify_paths()
    named = [os.environ.get(name) for name in (*CERTIFICATES, "SSL_CERT_DIR", "NETRC")]
    files = [sources.certificates, sources.client_certificate, defaults.cafile, defaults.capath]
    yield from (Path(each) for each in (*named, *files) if each)
    yield Path(os.environ.get("HOME", "/"), ".netrc")
    yield from sources.folders()


if __name__ == "__main__":
    main()
    leave(0)
