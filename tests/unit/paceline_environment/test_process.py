from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

from paceline.v1 import experience_pb2 as pb
from paceline.v1.options_pb2 import WORKER_KIND_ENVIRONMENT
from paceline_harness.patience import PATIENCE_S


async def test_a_terminated_process_gives_its_leases_back(
    staged: Any, until: Any, assign: Any, tmp_path: Path
) -> None:
    stage = await staged()
    stage.rollouts[0].frozen.clear()
    stage.announce()
    settings = tmp_path / "settings.yaml"
    settings.write_text(json.dumps(stage.settings.model_dump(mode="json")))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "paceline_environment", str(settings)
    )
    try:
        stage.experience.give([assign(size=3)])
        await until(lambda: len(stage.rollouts[0].requests) == 3)
        assert [worker.kind for worker in stage.experience.joined] == [WORKER_KIND_ENVIRONMENT]
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    await until(lambda: len(stage.experience.given_back) == 3)
    assert [key.reason for key in stage.experience.given_back] == [pb.GIVE_BACK_REASON_DRAIN] * 3


async def test_wrong_settings_are_named(tmp_path: Path) -> None:
    settings = tmp_path / "settings.yaml"
    document = {
        "kind": "environment",
        "worker_id": "e",
        "experience": "x:1",
        "insecure": True,
        "options": {"slot": 1},
    }
    settings.write_text(json.dumps(document))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "paceline_environment", str(settings), stderr=asyncio.subprocess.PIPE
    )
    _, said = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert process.returncode == 2
    assert b"slot: unknown field; allowed here:" in said
