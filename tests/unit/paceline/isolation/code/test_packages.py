"""Packages that the code of jobs requires: installed with the real pip, from wheels of a folder."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from paceline.config.packages import PackageSettings
from paceline.isolation.code.install import FETCHER, SHARED, UNPACKER, InstallError
from paceline.isolation.code.package_cache import PackageQuotaError
from paceline.isolation.code.packages import Packages
from paceline.isolation.code.wheels.messages import HANDLE
from paceline.isolation.frames import frame
from paceline.platform.fair_queue import QueueOwner
from paceline.platform.telemetry.metrics import Metrics
from paceline_harness.packages.wheels import write_wheel
from paceline_harness.patience import PATIENCE_S
from paceline_harness.processes import goes_on

MIB = 1 << 20


class Make:
    """Makes packages as different workers of a machine have them."""

    def __init__(self, folder: Path) -> None:
        self.made: list[Packages] = []
        self._folder = folder

    def __call__(self, *, metrics: Metrics | None = None, **settings: object) -> Packages:
        given = {"no_index": True, "folder": self._folder, "timeout_s": 60.0} | settings
        self.made.append(Packages(PackageSettings.model_validate(given), metrics=metrics))
        return self.made[-1]


@pytest.fixture
async def packages(tmp_path: Path) -> AsyncIterator[Make]:
    make = Make(tmp_path / "cache")
    yield make
    for each in make.made:
        await each.close()


def code_of(folder: Path, *requirements: str) -> Path:
    """A folder of code that requires these and has its wheels."""
    folder.mkdir(exist_ok=True)
    (folder / "requirements.txt").write_text("\n".join(requirements))
    return folder


async def installed(packages: Packages, code: Path, *, tenant: str = "t", job: str = "job") -> Path:
    wanted = packages.wanted(code)
    assert wanted is not None
    return await packages.folder(wanted, QueueOwner(tenant, job))


def version_in(folder: Path, name: str) -> str:
    """The version of a module that an interpreter finds there."""
    program = (
        f"import sys; sys.path.insert(0, {str(folder)!r}); import {name}; print({name}.VERSION)"
    )
    return subprocess.check_output([sys.executable, "-I", "-c", program], text=True).strip()


async def test_a_package_and_what_it_needs_are_installed_once(
    packages: Make, tmp_path: Path
) -> None:
    code = code_of(tmp_path / "code", "leaf<2")
    write_wheel(code / "wheels", "leaf", "1.5", requires=("root",))
    write_wheel(code / "wheels", "leaf", "2.0")
    write_wheel(code / "wheels", "root")
    one, other = packages(), packages()
    found = await asyncio.gather(*(installed(each, code) for each in (one, one, other)))
    assert len(set(found)) == 1
    assert version_in(found[0], "leaf") == "1.5"
    assert version_in(found[0], "root") == "1.0"
    made_at = found[0].stat().st_mtime_ns
    assert await installed(packages(), code) == found[0]
    assert found[0].stat().st_mtime_ns == made_at
    assert not [each for each in found[0].rglob("*.py") if each.stat().st_mode & 0o222]


async def test_other_wheels_of_the_same_name_do_not_replace_those_of_another_job(
    packages: Make, tmp_path: Path
) -> None:
    honest = code_of(tmp_path / "honest", "leaf==1.0")
    write_wheel(honest / "wheels", "leaf")
    forged = code_of(tmp_path / "forged", "leaf==1.0")
    write_wheel(forged / "wheels", "leaf", files={"leaf.py": 'VERSION = "forged"\n'})
    made = packages()
    assert version_in(await installed(made, forged), "leaf") == "forged"
    assert version_in(await installed(made, honest), "leaf") == "1.0"


async def test_what_is_missing_is_named(packages: Make, tmp_path: Path) -> None:
    code = code_of(tmp_path / "code", "leaf", "paceline-test-nowhere==7")
    write_wheel(code / "wheels", "leaf")
    made = packages()
    with pytest.raises(InstallError, match=r"requirements.txt: .*paceline-test-nowhere==7"):
        await installed(made, code)
    write_wheel(code / "wheels", "unrelated")  # another set of packages
    with pytest.raises(InstallError, match="paceline-test-nowhere==7"):
        await installed(made, code)
    assert not [each for each in (tmp_path / "cache").iterdir() if each.is_dir()]


async def test_other_versions_of_what_sealed_processes_share_are_refused(
    packages: Make, tmp_path: Path
) -> None:
    code = code_of(tmp_path / "code", "pydantic==1.0.1")
    write_wheel(code / "wheels", "pydantic", "1.0.1")
    with pytest.raises(InstallError, match="pydantic"):
        await installed(packages(), code)


async def test_sdists_are_not_built(packages: Make, tmp_path: Path) -> None:
    code = code_of(tmp_path / "code", "leaf")
    (code / "wheels").mkdir()
    (code / "setup.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    subprocess.run(
        ["tar", "czf", code / "wheels" / "leaf-1.0.tar.gz", "setup.py"], cwd=code, check=True
    )
    with pytest.raises(InstallError, match="leaf"):
        await installed(packages(), code)
    assert not (tmp_path / "ran").exists()


async def test_one_that_unpacks_to_too_much_is_refused(packages: Make, tmp_path: Path) -> None:
    code = code_of(tmp_path / "code", "leaf")
    write_wheel(code / "wheels", "leaf", files={"leaf.txt": "x" * (2 * MIB)})
    with pytest.raises(InstallError):
        await installed(packages(most_bytes=MIB), code)
    left = sum(each.stat().st_size for each in (tmp_path / "cache").rglob("*") if each.is_file())
    assert left < MIB


async def test_one_that_takes_too_long_is_given_up(packages: Make, tmp_path: Path) -> None:
    code = code_of(tmp_path / "code", "leaf")
    write_wheel(code / "wheels", "leaf")
    with pytest.raises(InstallError, match=r"not installed within 0.01 s"):
        await installed(packages(timeout_s=0.01), code)
    children = [each for each in psutil.Process().children() if goes_on(each)]
    assert not [
        each for each in children if "paceline.isolation.code.wheels" in " ".join(each.cmdline())
    ]


def big(folder: Path, letter: str) -> Path:
    """Code that requires a package of 900 KiB."""
    code = code_of(folder / f"code-{letter}", "leaf")
    write_wheel(code / "wheels", "leaf", files={"leaf.txt": letter * (900 << 10)})
    return code


async def test_what_a_job_of_any_worker_uses_is_not_deleted(packages: Make, tmp_path: Path) -> None:
    one, other = packages(cache_bytes=MIB), packages(cache_bytes=MIB)
    first, second = big(tmp_path, "a"), big(tmp_path, "b")
    found = await installed(one, first, job="1")
    assert await installed(other, first, job="2") == found
    one.end("1")
    with pytest.raises(InstallError, match=r"no room: .* packages\.cache_bytes"):
        await installed(one, second, job="3")
    with pytest.raises(PackageQuotaError, match=r"'t' use; packages\.tenant_bytes is 1048576"):
        await installed(packages(tenant_bytes=MIB), second, job="3")
    assert found.is_dir()
    await other.close()
    assert (await installed(packages(cache_bytes=MIB), second, job="3")).is_dir()
    assert not found.exists()


async def test_a_tenant_does_not_wait_for_the_installations_of_another(
    packages: Make, tmp_path: Path
) -> None:
    metrics = Metrics()
    made = packages(metrics=metrics)
    flood = [
        asyncio.create_task(installed(made, big(tmp_path, letter), tenant="flood"))
        for letter in "abcd"
    ]
    while not metrics.registry.get_sample_value("paceline_package_installs_waiting"):
        await asyncio.sleep(0.01)
    # Even what the other has asked for too.
    await installed(made, tmp_path / "code-d", tenant="modest")
    assert sum(not each.done() for each in flood) >= 1
    await asyncio.gather(*flood)
    assert metrics.registry.get_sample_value("paceline_package_installs_waiting") == 0
    total = metrics.registry.get_sample_value("paceline_package_cache_bytes")
    assert total is not None
    assert total > 4 * (900 << 10)


KILLED = """
import asyncio, sys
from pathlib import Path
from paceline.isolation.code.packages import Packages
from paceline.isolation.code.wheels.messages import HANDLE
from paceline.config.packages import PackageSettings

async def main():
    made = Packages(PackageSettings(no_index=True, folder=Path(sys.argv[2])))
    wanted = made.wanted(Path(sys.argv[1]))
    await made.folder(wanted)

asyncio.run(main())
"""


async def test_a_worker_that_is_killed_while_it_installs_leaves_nothing_half_done(
    packages: Make, tmp_path: Path
) -> None:
    code = code_of(tmp_path / "code", "leaf")
    write_wheel(code / "wheels", "leaf", files={f"leaf{n}.py": "" for n in range(3000)})
    cache = tmp_path / "cache"
    for _ in range(3):
        worker = subprocess.Popen([sys.executable, "-c", KILLED, code, cache])
        deadline = time.monotonic() + PATIENCE_S
        while not list(cache.glob("new-*/site")):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        family = psutil.Process(worker.pid).children(recursive=True)
        worker.kill()
        worker.wait()
        while any(map(goes_on, family)):
            assert time.monotonic() < deadline + 30
            await asyncio.sleep(0.01)
        # It may have been faster than this process, which others delay.
        if not [each for each in cache.iterdir() if each.is_dir() and len(each.name) == 64]:
            break
        shutil.rmtree(cache)
    else:
        pytest.fail("each time the installation ended first")
    found = await installed(packages(), code)
    assert len(list(found.glob("leaf*.py"))) == 3000
    assert not list(cache.glob("new-*"))
    assert [each.name for each in cache.glob("*.lock")] == ["all.lock"]


@pytest.mark.parametrize("module", [FETCHER, UNPACKER])
def test_an_installation_whose_worker_has_ended_does_not_begin(module: str, tmp_path: Path) -> None:
    """Its parent is another process then."""
    requests: dict[str, dict[str, object]] = {
        FETCHER: {"requirements": [], "constraints": [], "own": [], "sources": {}, "most_bytes": 1},
        UNPACKER: {"wheels": []},
    }
    for worker, begins in ((os.getpid(), True), (os.getppid(), False)):
        hold = {"parent": worker, "file_bytes": MIB, "cpu_s": 60}
        request = requests[module] | {"into": str(tmp_path), "hold": hold}
        data = frame({"$id": 0, "op": HANDLE, "request": request})
        done = subprocess.run([sys.executable, "-I", "-m", module], input=data, capture_output=True)
        assert (done.returncode, done.stderr) == (0 if begins else 1, b"")
        assert bool(done.stdout) == begins


async def test_a_folder_that_others_could_write_to_is_not_used(
    packages: Make, tmp_path: Path
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    code = code_of(tmp_path / "code", "leaf")
    write_wheel(code / "wheels", "leaf")
    with pytest.raises(InstallError, match="only this user"):
        await installed(packages(), code)


async def test_an_installation_may_install_nothing(packages: Make, tmp_path: Path) -> None:
    with pytest.raises(InstallError, match=r"packages\.install"):
        await installed(packages(install=False), code_of(tmp_path / "code", "leaf"))
    assert packages().wanted(code_of(tmp_path / "none")) is None


def test_sealed_processes_load_no_other_package_of_the_worker() -> None:
    """Else a job could get another version than it required."""
    program = """
import json, sys
from importlib.metadata import packages_distributions
import paceline.isolation.code.world_child, paceline_reward.child
roots = {name.partition(".")[0] for name in sys.modules}
known = packages_distributions()
print(json.dumps(sorted({each for name in roots for each in known.get(name, ())})))
"""
    found = json.loads(subprocess.check_output([sys.executable, "-c", program], text=True))
    ours = {"paceline", "grpcio-tools", "setuptools"}  # the last ones only for development
    assert {each.lower().replace("_", "-") for each in found} - ours <= {*SHARED}
