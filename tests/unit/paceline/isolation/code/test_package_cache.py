"""Whose sets of packages stay, and whose go when there is no room."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config.packages import PackageSettings
from paceline.isolation.code.install import InstallError
from paceline.isolation.code.package_cache import PackageCache, PackageQuotaError

MIB = 1 << 20
TENANTS, NAMES = ("a", "b", "c"), ("1", "2", "3", "4", "5", "6")


class Cache:
    """A cache of sets of 1 MiB, or 2 for even names, and who uses them."""

    def __init__(self, folder: Path, *, cache_mib: int, tenant_mib: int) -> None:
        self.root = folder / "cache"
        self.root.mkdir()
        self._draft = folder / "draft"
        self._settings = PackageSettings(cache_bytes=cache_mib * MIB, tenant_bytes=tenant_mib * MIB)
        self._times = itertools.count(1_000_000_000)
        self.held: dict[tuple[str, str], int] = {}
        self.cache = PackageCache(self.root, self._settings)

    def use(self, name: str, tenant: str) -> None:
        """Ask for a set as a worker does."""
        self.cache = PackageCache(self.root, self._settings)
        fd = self.cache.hold(name, tenant)
        if fd is None:
            fd = self.cache.claim(name, tenant)
        if fd is None:
            self._draft.mkdir(exist_ok=True)
            with (self._draft / "leaf").open("wb") as file:
                file.truncate((2 if int(name) % 2 == 0 else 1) * MIB)
            fd = self.cache.add(self._draft, name, tenant)
        self.held[tenant, name] = fd

    def leave(self, name: str, tenant: str) -> None:
        """Use it no longer."""
        fd = self.held.pop((tenant, name))
        self.cache.release(fd)
        when = next(self._times)
        os.utime(self.root / f"{name}.owners" / f"@{tenant}", (when, when))

    @property
    def names(self) -> set[str]:
        """Of the sets that are there."""
        return {each.name for each in self.root.iterdir() if "." not in each.name}

    def totals(self) -> Counter[str]:
        """MiB of each tenant."""
        found = Counter[str]()
        for path in self.root.glob("*.owners/@*"):
            found[path.name[1:]] += 2 if int(path.parent.name[0]) % 2 == 0 else 1
        return found


@settings(max_examples=60, deadline=None)
@given(
    acts=st.lists(
        st.tuples(st.sampled_from(TENANTS), st.sampled_from(NAMES), st.booleans()), max_size=25
    )
)
def test_limits_hold_and_nobody_loses_what_it_uses_or_its_share(
    acts: list[tuple[str, str, bool]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        cache = Cache(Path(folder), cache_mib=6, tenant_mib=4)
        for tenant, name, leaves in acts:
            before, claims = cache.totals(), set(cache.root.glob("*.owners/@*"))
            try:
                if (tenant, name) not in cache.held:
                    cache.use(name, tenant)
                if leaves:
                    cache.leave(name, tenant)
            except InstallError:
                pass
            after = cache.totals()
            assert all(each in cache.names for _, each in cache.held)
            assert max(after.values(), default=0) <= 4
            assert cache.cache.count_bytes() <= 6 * MIB
            share = 6 / len(before.keys() | {tenant})
            for other in before.keys() - {tenant}:
                if before[other] <= share:
                    lost = claims - set(cache.root.glob("*.owners/@*"))
                    assert not [each for each in lost if each.name == f"@{other}"]
        for tenant, name in list(cache.held):
            cache.leave(name, tenant)


def test_the_tenant_furthest_above_its_share_gives_up_what_it_used_least_lately(
    tmp_path: Path,
) -> None:
    cache = Cache(tmp_path, cache_mib=7, tenant_mib=7)
    for name, tenant in (("1", "modest"), ("3", "flood"), ("5", "flood"), ("2", "flood")):
        cache.use(name, tenant)
        cache.leave(name, tenant)
    cache.use("4", "flood")
    assert cache.names == {"1", "2", "3", "4", "5"}
    cache.use("6", "newcomer")
    assert cache.names == {"1", "2", "4", "6"}
    cache.leave("4", "flood")
    cache.use("7", "modest")
    assert cache.names == {"1", "4", "6", "7"}


def test_a_set_counts_for_each_tenant_and_goes_with_the_last(tmp_path: Path) -> None:
    cache = Cache(tmp_path, cache_mib=9, tenant_mib=3)
    cache.use("2", "a")
    cache.use("2", "b")
    assert cache.totals() == {"a": 2, "b": 2}
    with pytest.raises(PackageQuotaError, match=r"4194304 bytes .* 'b' .*packages.tenant_bytes"):
        cache.use("4", "b")
    cache.leave("2", "b")
    cache.use("4", "b")
    assert cache.totals() == {"a": 2, "b": 2}
    cache.leave("2", "a")
    cache.use("6", "a")
    assert cache.names == {"4", "6"}


def test_what_killed_workers_left_is_removed(tmp_path: Path) -> None:
    cache = Cache(tmp_path, cache_mib=9, tenant_mib=9)
    for name in ("new-8", "old-8", "8", "7.owners"):
        (cache.root / name).mkdir()
    for name in ("8.lock", "7.lock", "7.owners/@a"):
        (cache.root / name).touch()
    cache.use("1", "a")
    assert {each.name for each in cache.root.iterdir()} == {"1", "1.owners"}
