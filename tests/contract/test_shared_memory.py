"""Weights in shared memory, which PyTorch manages in a child process: `torch_shm_manager`."""

import subprocess
import sys

from paceline_harness.patience import PATIENCE_S

LOADS = """
import asyncio
import paceline  # before gRPC, as in every service
import psutil, torch
from grpc import aio
from paceline.testing.engines import snapshot
from paceline_harness.sglang import FakeSglang
from paceline_rollout.engines.sglang.api import SglangClient
from paceline_rollout.engines.sglang.capabilities import parse_version
from paceline_rollout.engines.sglang.loading import Loader, LoadOptions, folder_for

async def main():
    # As in a worker, gRPC has threads when the child is forked.
    server = aio.server()
    channel = aio.insecure_channel(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    await server.start()
    await channel.channel_ready()
    fake = FakeSglang(vocab_size=32, context=64)
    client = SglangClient(await fake.start())
    options = LoadOptions(
        method="tensor", ranks=1, shared_memory=True, folder=folder_for(None, attached=False),
        bucket_bytes=1 << 20, backend="gloo",
    )
    loader = Loader(client=client, capabilities=parse_version(fake.version), options=options)
    version = 0
    while fake.updates[-1:] != ["tensor"]:  # a keeper that takes a second to answer is given up
        version += 1
        await loader.load(snapshot(torch.nn.Linear(5, 7), version), flush=False)
    [keeper] = psutil.Process().children()
    keeper.kill()
    keeper.wait(60)
    await loader.load(snapshot(torch.nn.Linear(5, 7), version + 1), flush=False)
    print(int(fake.label) - version, *fake.updates[-2:])
    await client.close()
    await fake.stop()
    await channel.close()
    await server.stop(0)

asyncio.run(main())
"""


def test_weights_fall_back_to_disk() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADS],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.stdout == "1 tensor disk\n", done.stderr
    assert "fork" not in done.stderr
