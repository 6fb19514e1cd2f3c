"""Checks of this machine: cores, memory, GPUs, packages, sandbox, disk, limits."""

from __future__ import annotations

import asyncio
import csv
import os
import platform
import resource
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from paceline.config.precision import CPUINFO, GPUS, UNITS, fast_dtype
from paceline.errors import UnavailableError
from paceline.front.cli.doctor.finding import Finding, broken, installing, note, ok
from paceline.platform.text import human_bytes
from paceline.plugins import registry

ROLES = (
    *("gateway", "controller", "experience", "environment", "reward"),
    *("trainer", "rollout", "tracking"),
)
SGLANG = Path(".venv-sglang")  # where the engine looks for it unless its pool says otherwise
_GIB = 1 << 30
_LEAST_DISK, _LEAST_MEMORY, _LEAST_SHARED = 10 * _GIB, 4 * _GIB, _GIB
_LEAST_FILES = 4096
_COMMAND_S = 10.0
_CONTAINER = Path("/.dockerenv")
_SANDBOX_MENDS = (
    ("seccomp", installing("paceline[sandbox]")),
    ("apparmor", "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"),
    (
        "namespace",  # the second setting is Debian's
        "sudo sysctl -e -w user.max_user_namespaces=15000 kernel.unprivileged_userns_clone=1",
    ),
)


def cores(
    *, memory: Path = Path("/proc/meminfo"), groups: Path = Path("/sys/fs/cgroup")
) -> Finding:
    """Cores and memory that this process may use."""
    count = float(
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota, _, period = _text(groups / "cpu.max").partition(" ")
    if quota.isdecimal() and period.strip().isdecimal():
        count = min(count, int(quota) / int(period))
    total = memory_bytes(memory=memory, groups=groups)
    text = f"{count:g} cores, {human_bytes(total)} of memory, {platform.machine()}"
    if total and total < _LEAST_MEMORY:
        return note("machine", f"{text}; local runs need {human_bytes(_LEAST_MEMORY)}")
    return ok("machine", text)


def memory_bytes(
    *, memory: Path = Path("/proc/meminfo"), groups: Path = Path("/sys/fs/cgroup")
) -> int:
    """Bytes that this process may use; 0: unknown."""
    total = _meminfo(_text(memory)).get("MemTotal", 0)
    limit = _text(groups / "memory.max")
    return min(total, int(limit)) if limit.isdecimal() and total else total


def precision(*, cpuinfo: Path = CPUINFO, gpus: Path = GPUS) -> Finding:
    """The dtype that `auto` stands for here, and the processor's units behind it."""
    chosen = fast_dtype(cpuinfo=cpuinfo, gpus=gpus)
    words = set(_text(cpuinfo).split())
    units = ", ".join(sorted(UNITS & words)) or "none"
    return ok("dtype", f"auto is {chosen} (units for bfloat16 in the processor: {units})")


def gpus() -> Finding:
    """GPUs with their memory, as nvidia-smi says; and whether torch could use them."""
    if shutil.which("nvidia-smi") is None:
        present = GPUS.is_dir() and any(GPUS.iterdir())
        if present:
            text = "there are GPUs, but no nvidia-smi; install NVIDIA's driver, or start the "
            return broken("gpus", text + "container with the devices and tools of the host")
        return ok("gpus", "none")
    query = ["--query-gpu=name,memory.total,memory.free,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            ["nvidia-smi", *query], capture_output=True, text=True, timeout=_COMMAND_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return broken("gpus", f"nvidia-smi does not answer: {error}")
    if done.returncode != 0:
        return broken("gpus", f"nvidia-smi: {(done.stdout or done.stderr).strip()[:200]}")
    rows = [[cell.strip() for cell in row] for row in csv.reader(done.stdout.splitlines())]
    text = "; ".join(f"{row[0]}, {row[1]} ({row[2]} free)" for row in rows if len(row) >= 4)
    if not text:
        return ok("gpus", "none")
    number, _, build = (_version("torch") or "").partition("+")
    if build == "cpu":
        mend = f"{installing(f'torch=={number}')} --force-reinstall"
        text = f"{text}; torch is built for CPUs only; PyPI has builds for GPUs"
        return broken("gpus", text, f"{mend} --index-url https://pypi.org/simple")
    return ok("gpus", text)


def engines(sglang: Path = SGLANG) -> Finding:
    """The engines that jobs may name here, and the versions of what they need."""
    names = sorted(registry.installed("engines"))
    versions = {name: _version(name) or "not installed" for name in ("torch", "transformers")}
    if "sglang" in names:  # it has an environment of its own
        packages = sglang.glob("lib/python*/site-packages/sglang-*.dist-info")
        numbers = [path.name.removesuffix(".dist-info").partition("-")[2] for path in packages]
        versions["sglang"] = numbers[0] if numbers else f"not in {sglang}"
    text = ", ".join(f"{name} {number}" for name, number in versions.items())
    text += f"; jobs may name {', '.join(names)}" if names else "; no engine is installed"
    if _version("torch") is None:
        return note("engines", text, installing("paceline[trainer,rollout]"))
    return ok("engines", text)


def roles() -> Iterator[Finding]:
    """Which services this Python could run."""
    complete: list[str] = []
    for role in ROLES:
        missing = sorted(missing_of(role))
        if missing:
            text = f"cannot run here: needs {', '.join(missing)}"
            yield note(f"service {role}", text, installing(f"paceline[{role}]"))
        else:
            complete.append(role)
    if complete:
        yield ok("services", f"{', '.join(complete)} can run here")


def missing_of(extra: str) -> set[str]:
    """Requirements of an extra of this distribution that are absent, or have a wrong version."""
    missing: set[str] = set()
    seen: set[str] = set()
    pending = [extra]
    requirements = [Requirement(text) for text in distribution("paceline").requires or ()]
    while pending:
        wanted = pending.pop()
        seen.add(wanted)
        for requirement in requirements:
            if requirement.marker is None or not requirement.marker.evaluate({"extra": wanted}):
                continue
            if canonicalize_name(requirement.name) == "paceline":
                pending += [name for name in requirement.extras if name not in seen]
            elif not requirement.specifier.contains(
                _version(requirement.name) or "0.dev0", prereleases=True
            ):
                missing.add(f"{requirement.name}{requirement.specifier}")
    return missing


def sandbox() -> Finding:
    """By which level programs are contained here, and why by no higher one; tries it."""
    from paceline.isolation.sandbox.probe import probe

    try:
        text = asyncio.run(probe())
    except (UnavailableError, ModuleNotFoundError) as error:
        why = getattr(error, "message", str(error))
        text = f"{why}; the reward `code` and code of jobs do not work here"
        return broken("sandbox", text.removeprefix("sandbox: "), _sandbox_mend(why, "seccomp"))
    if "no namespaces:" in text:
        return note(
            "sandbox", text, _sandbox_mend(text.partition("no namespaces:")[2], "namespace")
        )
    return ok("sandbox", text)


def disk(folder: Path, *, shared: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """Room for runs, and for what engines share between processes."""
    place = next(
        parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists()
    )
    free = shutil.disk_usage(place).free
    text = f"{human_bytes(free)} free for {folder}"
    if not os.access(place, os.W_OK):
        yield broken("disk", f"{place} cannot be written", f"sudo chown $(id -u) {place}")
    elif free < _LEAST_DISK:
        yield note(
            "disk",
            f"{text}; checkpoints of a 1 B model need 14 GB each",
            f"du -xh {place} | sort -h | tail",
        )
    else:
        yield ok("disk", text)
    if shared.is_dir() and (room := shutil.disk_usage(shared).total) < _LEAST_SHARED:
        text = f"{human_bytes(room)} in {shared}; several GPUs need more"
        if _CONTAINER.exists():
            yield note("shared memory", f"{text}: start the container with --shm-size 1g")
        else:
            mend = f"sudo mount -o remount,size={_LEAST_SHARED} {shared}"
            yield note("shared memory", text, mend)


def files() -> Finding:
    """How many files a process may open: every episode and worker has connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft} files may be open at once"
    if 0 <= soft < _LEAST_FILES:
        most = hard if hard > 0 else _LEAST_FILES
        return note("open files", text, f"ulimit -n {max(min(most, 65_536), soft)}")
    return ok("open files", text)


def _sandbox_mend(why: str, fallback: str) -> str:
    mends = dict(_SANDBOX_MENDS)
    return next((mend for word, mend in _SANDBOX_MENDS if word in why.lower()), mends[fallback])


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _meminfo(text: str) -> Mapping[str, int]:
    """Bytes by name."""
    rows = (line.split() for line in text.splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) >= 2}
