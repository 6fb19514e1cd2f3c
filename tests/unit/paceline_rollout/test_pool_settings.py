"""What is run on a machine is said by its pool; a job chooses among typed options."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.config import parse_job
from paceline.config.load import load_settings
from paceline.config.named import problems
from paceline.config.service import PoolOptions, ServiceSettings
from paceline.enums import WorkerKind
from paceline.errors import ConfigError
from paceline.front.local.ports import PortSlots
from paceline_controller.jobs.plan import Wanted
from paceline_controller.runtimes.process import ProcessRuntime
from paceline_harness.runtime import MadeUpCredentials
from paceline_rollout.job import build_engine

SHELL = [
    {"python": "/bin/sh"},
    {"module": "os"},
    {"args": ["--trust-remote-code"]},
    {"environment": {"LD_PRELOAD": "/tmp/evil.so"}},
    {"url": "http://169.254.169.254"},
    {"api_key": "secret"},
    {"folder": "/etc"},
    {"settings": {"python": "/bin/sh"}},
    {"model_dir": "/etc"},
    {"device": "cpu --model-path=/etc"},
]
ENGINES = {"sglang": {"python": sys.executable, "module": "paceline_harness.sglang"}}


def spec_of(**options: Any) -> Any:
    return parse_job(
        {
            "name": "sums",
            "model": {"path": "m"},
            "tasks": {"environment": "arithmetic"},
            "reward": ["exact"],
            "rollout": {"engine": {"kind": "sglang", **options}},
        }
    )


@pytest.mark.parametrize("options", SHELL, ids=lambda options: next(iter(options)))
def test_a_job_cannot_choose_what_is_executed(options: dict[str, Any], tmp_path: Path) -> None:
    (field,) = options
    (line,) = problems(spec_of(**options))
    assert line.startswith(f"rollout.engine.{field}: ")
    if field == "device":
        return
    assert "; allowed: backend, bucket_bytes, cache_tokens" in line
    (tmp_path / "config.json").write_text("{}")
    # Nor where a job is that was accepted elsewhere.
    with pytest.raises(ConfigError, match=field):
        build_engine(spec_of(**options), folder=tmp_path, job_id="job", engines=ENGINES)


def test_typed_options_are_the_jobs() -> None:
    chosen = {"tp": 2, "mem_fraction": 0.8, "kv_dtype": "fp8_e5m2", "chunked_prefill": 4096}
    assert list(problems(spec_of(device="cpu", **chosen))) == []
    (line,) = problems(spec_of(mem_fraction=1.5))
    assert line.startswith("rollout.engine.mem_fraction: ")


async def test_a_pool_passes_its_settings_to_its_workers(tmp_path: Path) -> None:
    commands: list[Path] = []

    def command(wanted: Wanted, path: Path) -> list[str]:
        commands.append(path)
        return [sys.executable, "-c", ""]

    settings = ServiceSettings(
        kind=WorkerKind.CONTROLLER, worker_id="controller-0", run_dir=tmp_path, experience="e:1"
    )
    runtime = ProcessRuntime(
        settings,
        credentials=MadeUpCredentials(),
        ports=PortSlots(tmp_path / "ports.json"),
        beat=tmp_path / "beat",
        child_grace_s=1.0,
        pools={"default": PoolOptions(), "gpu": PoolOptions(engines=ENGINES)},
        command=command,
    )
    for pool, engines in (("default", {}), ("gpu", ENGINES)):
        name = f"rollout-{pool}-0"
        await runtime.start(
            Wanted(name, WorkerKind.ROLLOUT, job_id="job", pool=pool), incarnation=0
        )
        assert load_settings(commands[-1]).options["engines"] == engines
        await runtime.stop(name, grace_s=0.0)
