"""Starting a container that hangs during startup."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from kubernetes_double.nodes.kubelet.container import Spec, start


def spec(network: Path) -> Spec:
    return Spec(
        network=str(network),
        hostname="x",
        scratch="",
        binds=(),
        links={},
        read_only_root=False,
        no_new_privileges=False,
        uid=0,
        gid=0,
        groups=(),
        directory="/",
        command=("true",),
        environment={},
    )


def of(folder: Path) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(folder) in " ".join(process.info["cmdline"] or [])
    ]


async def test_a_start_that_is_given_up_leaves_no_process(
    tmp_path: Path, until: Callable[..., None]
) -> None:
    os.mkfifo(tmp_path / "network")  # opening it blocks forever
    starting = asyncio.create_task(
        start(spec(tmp_path / "network"), folder=tmp_path, log=tmp_path / "log")
    )
    while not of(tmp_path):
        assert not starting.done()
        await asyncio.sleep(0.05)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await asyncio.to_thread(until, lambda: not of(tmp_path))
