from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from paceline.enums import JobState

if TYPE_CHECKING:
    from conftest import Gateway
else:
    Gateway = Any

DOCS = Path(__file__).parents[3] / "docs" / "api.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)


@pytest.mark.parametrize("snippet", SNIPPETS)
async def test_snippets_run(
    gateway: Gateway, job: dict[str, Any], tmp_path: Path, snippet: str
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    token = tmp_path / "given"
    token.write_text(gateway.http.headers["authorization"].removeprefix("Bearer "))
    for shown, real in {
        "runs/local/gateway.json": str(tmp_path / "gateway.json"),
        "runs/local/token": str(token),
        "examples/arithmetic.yaml": str(path),
        "http://127.0.0.1:8300": str(gateway.http.base_url),
    }.items():
        snippet = snippet.replace(shown, real)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", snippet, stdout=asyncio.subprocess.PIPE
    )
    while not gateway.jobs.jobs:
        assert process.returncode is None
        await asyncio.sleep(0.02)
    await gateway.jobs.move("job-0", JobState.STARTING, JobState.RUNNING, JobState.SUCCEEDED)
    output, _ = await process.communicate()
    assert process.returncode == 0
    state = output.decode().splitlines()[-2].lower().removeprefix("job_state_")
    assert state.startswith("succeeded")
    assert output.decode().splitlines()[-1] == "True"
