"""The folder of installed sets of packages, and which tenants they count for.

    NAME/             a set, to import from
    NAME.owners/@T    tenant T has asked for it; locked by every worker in which a job of T uses it
    INPUTS.set        the name of the set that these inputs were resolved to
    INPUTS.lock       held while they are being resolved and installed
    new-INPUTS, old-NAME    being installed, being deleted
    all.lock          held by whoever adds, claims or deletes sets

A set counts for every tenant that has asked for it, and is there until none of them has.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from paceline.config.packages import PackageSettings
from paceline.isolation.code.file_locks import remove_unused, try_lock, unlock
from paceline.isolation.code.install import InstallError, size_of

DRAFT = "new-"
ALL = "all.lock"
_GONE, _OWNERS, _LOCK, _SET, _TENANT = "old-", ".owners", ".lock", ".set", "@"


class PackageQuotaError(InstallError):
    """The packages that jobs of a tenant use are as large as they may be."""


@dataclass(frozen=True, slots=True)
class _Claim:
    """That a tenant has asked for a set."""

    tenant: str
    name: str
    used: float  # seconds since the epoch
    path: Path


class PackageCache:
    """Adds sets and deletes those that were not used for longest.

    Every method that changes it is to be called with `ALL` locked.
    """

    def __init__(self, root: Path, settings: PackageSettings) -> None:
        self.root = root
        self._settings = settings
        self._sizes: dict[tuple[str, int], int] = {}  # by name and inode: sets do not change

    def resolved(self, inputs: str) -> str | None:
        """The name of the set that inputs were resolved to; None: that is not known.

        Needs no lock. There may be no such set any more.
        """
        with suppress(FileNotFoundError):
            return (self.root / f"{inputs}{_SET}").read_text()
        return None

    def remember(self, inputs: str, name: str) -> None:
        """Let `resolved` know; needs the draft of these inputs and a hold of the set."""
        draft = self.root / f"{DRAFT}{inputs}" / "name"
        draft.write_text(name)
        draft.rename(self.root / f"{inputs}{_SET}")

    def hold(self, name: str, tenant: str) -> int | None:
        """A descriptor that keeps a set for a tenant until it is unlocked; None: it has none.

        Needs no lock.
        """
        try:
            fd = try_lock(self._path_of(name, tenant), shared=True)
        except FileNotFoundError:
            return None
        if fd is not None and not (self.root / name).is_dir():
            unlock(fd)
            return None
        if fd is not None:
            os.utime(fd)
        return fd

    def release(self, fd: int) -> None:
        """Give back what `hold` or `claim` has returned; it was in use until now."""
        os.utime(fd)
        unlock(fd)

    def claim(self, name: str, tenant: str) -> int | None:
        """As `hold`, for a tenant that has not asked before; None: there is no such set.

        Raises:
            PackageQuotaError: the tenant would have too much.
        """
        if not (self.root / name).is_dir():
            return None
        if (held := self.hold(name, tenant)) is not None:  # by another worker, meanwhile
            return held
        self._check_tenant(tenant, self._size(name))
        return self._claimed(name, tenant)

    def claim_resolved(self, inputs: str, tenant: str) -> tuple[str, int] | None:
        """The set that inputs were resolved to, and what `claim` returns; None: it is not here.

        Raises:
            PackageQuotaError: as `claim`.
        """
        name = self.resolved(inputs)
        fd = None if name is None else self.claim(name, tenant)
        return None if name is None or fd is None else (name, fd)

    def add(self, made: Path, name: str, tenant: str) -> int:
        """Move a set here, unless it came here meanwhile; returns what `hold` does.

        Raises:
            PackageQuotaError: its tenant would have too much.
            InstallError: there is no room, as the others are in use.
        """
        if (fd := self.claim(name, tenant)) is not None:
            return fd
        num_bytes = size_of(made)
        self._clean()
        self._check_tenant(tenant, num_bytes)
        self._make_room(tenant, num_bytes)
        fd = self._claimed(name, tenant)
        made.rename(self.root / name)
        return fd

    def count_bytes(self) -> int:
        """What all sets take."""
        return sum(map(self._size, self._names()))

    def _claimed(self, name: str, tenant: str) -> int:
        path = self._path_of(name, tenant)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        fd = try_lock(path, shared=True, create=True)
        assert fd is not None  # only who has `ALL` locks it for itself
        return fd

    def _check_tenant(self, tenant: str, num_bytes: int) -> None:
        """Make a tenant give up what its jobs do not use, until it may have so much more."""
        most = self._settings.tenant_bytes
        own = sorted(self._claims(tenant), key=lambda each: each.used)
        total = num_bytes + sum(self._size(each.name) for each in own)
        unused = [each for each in own if total > most and not _in_use(each)]
        needed = total - sum(self._size(each.name) for each in unused)
        if needed > most:
            raise PackageQuotaError(
                f"{needed} bytes with the packages that jobs of tenant {tenant!r} use; "
                f"packages.tenant_bytes is {most}"
            )
        for each in unused:
            if total <= most:
                return
            num_bytes = self._size(each.name)
            total -= num_bytes if self._drop(each) else 0

    def _make_room(self, tenant: str, num_bytes: int) -> None:
        """Delete what is not in use, of the tenant furthest above its share, until it fits."""
        most = self._settings.cache_bytes
        while (total := num_bytes + self.count_bytes()) > most:
            if not any(map(self._drop, self._candidates(tenant, num_bytes))):
                raise InstallError(
                    f"no room: {total} bytes with the packages in use; packages.cache_bytes is "
                    f"{most}"
                )

    def _candidates(self, tenant: str, num_bytes: int) -> Iterator[_Claim]:
        """What may be given up for a set of a tenant, in this order.

        A tenant within its share loses nothing because of others.
        """
        claims = list(self._claims())
        owners = Counter(each.name for each in claims)
        totals = Counter({tenant: num_bytes})
        for each in claims:
            totals[each.tenant] += self._size(each.name)
        share = self._settings.cache_bytes / len(totals)
        above = [name for name, total in totals.most_common() if total > share]
        for name in dict.fromkeys([*above, tenant]):
            own = [each for each in claims if each.tenant == name]
            yield from sorted(own, key=lambda each: (owners[each.name] > 1, each.used))

    def _drop(self, claim: _Claim) -> bool:
        """End a claim, and delete its set if it was the last; False: it is in use."""
        if not remove_unused(claim.path):
            return False
        with suppress(OSError):  # there are others
            claim.path.parent.rmdir()
            self._delete(claim.name)
        return True

    def _delete(self, name: str) -> None:
        gone = self.root / f"{_GONE}{name}"
        with suppress(FileNotFoundError):
            (self.root / name).rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

    def _clean(self) -> None:
        """Delete what workers that were killed have left."""
        for gone in self.root.glob(f"{_GONE}*"):
            shutil.rmtree(gone, ignore_errors=True)
        for draft in self.root.glob(f"{DRAFT}*"):
            self._remove_draft(draft)
        for lock in self.root.glob(f"*{_LOCK}"):
            if lock.name != ALL:
                remove_unused(lock)
        for name in self._names():
            if not any(self._path_of(name, "").parent.glob(f"{_TENANT}*")):
                self._delete(name)
        for owners in self.root.glob(f"*{_OWNERS}"):
            if not (self.root / owners.name.removesuffix(_OWNERS)).is_dir():
                shutil.rmtree(owners, ignore_errors=True)
        for resolved in self.root.glob(f"*{_SET}"):
            name = self.resolved(resolved.name.removesuffix(_SET))
            if name is not None and not (self.root / name).is_dir():
                resolved.unlink(missing_ok=True)

    def _remove_draft(self, draft: Path) -> None:
        """Remove a draft, unless somebody works on it."""
        lock = self.root / f"{draft.name.removeprefix(DRAFT)}{_LOCK}"
        fd = try_lock(lock, create=True)
        if fd is not None:
            shutil.rmtree(draft, ignore_errors=True)
            lock.unlink()
            unlock(fd)

    def _names(self) -> list[str]:
        names = [each.name for each in self.root.iterdir() if each.is_dir()]
        return [each for each in names if not each.startswith((DRAFT, _GONE)) and "." not in each]

    def _claims(self, tenant: str | None = None) -> Iterator[_Claim]:
        """Of a tenant, or of all."""
        for path in self.root.glob(f"*{_OWNERS}/{_TENANT}*"):
            owner, name = unquote(path.name[1:]), path.parent.name.removesuffix(_OWNERS)
            if tenant in (None, owner) and (self.root / name).is_dir():
                yield _Claim(owner, name, path.stat().st_mtime, path)

    def _size(self, name: str) -> int:
        folder = self.root / name
        key = name, folder.stat().st_ino
        if key not in self._sizes:
            self._sizes = {known: size for known, size in self._sizes.items() if known[0] != name}
            self._sizes[key] = size_of(folder)
        return self._sizes[key]

    def _path_of(self, name: str, tenant: str) -> Path:
        return self.root / f"{name}{_OWNERS}" / f"{_TENANT}{quote(tenant, safe='')}"


def lock_of(root: Path, name: str) -> Path:
    """The file that is locked while a set is being installed."""
    return root / f"{name}{_LOCK}"


def _in_use(claim: _Claim) -> bool:
    """Whether a job of the tenant uses the set now."""
    try:
        fd = try_lock(claim.path)
    except FileNotFoundError:
        return False
    if fd is not None:
        unlock(fd)
    return fd is None
