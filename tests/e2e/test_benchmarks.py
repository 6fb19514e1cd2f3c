"""Every script of `benchmarks/` runs with `--smoke`, and writes what its stored results have."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline_harness.network import Network

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
WARM = (
    "torch",
    "transformers",
    "paceline_trainer.service",
    "paceline_rollout.engines.torch.engine",
)
# Programs that a benchmark starts, not benchmarks themselves. Those of `with_trl` need TRL's own
# environment, which CI does not have: they are not run, and the results of both smokes say so.
PROGRAMS = {
    "chaos/model.py": "faults.py",
    "fleet/seed.py": "broadcast.py",
    "fleet/tracker.py": "broadcast.py",
    "fleet/worker.py": "broadcast.py",
    "rig/forked.py": "",  # runs them
    "rig/smoke.py": "",
    "with_trl/coming_from.py": "",  # records what a test of the methods reads
    "with_trl/grpo.py": "bench_trl.py",
    "with_trl/step.py": "step_beside_trl.py",
}
SCRIPTS = sorted(
    str(path.relative_to(BENCHMARKS))
    for path in BENCHMARKS.rglob("*.py")
    if "__main__" in path.read_text() and str(path.relative_to(BENCHMARKS)) not in PROGRAMS
)
RESULTS = BENCHMARKS / "results"
# Where the results are stored, unless the name is that of the script.
STORED = {
    "bench_trl.py": "",  # has both sides
    "chaos/ledger_property.py": "ledger_property",
    "generation/activation.py": "activation",
    "generation/canary.py": "canary",
    "gpu/trainer.py": "",  # rows of several runs, put together by hand
    "learning/environments.py": "environments",
    "learning/generation.py": "generation",
    "step_beside_trl.py": "",  # has both sides
}
BY_HAND = {"faults_found", "notes"}  # keys added to stored results
FAULTS = ("kill trainer", "network reset", "environment plug-in: raise")
# The longest first.
FIRST = ("faults.py", "tracing.py", "bench_trl.py", "pipeline.py", "recipes.py")
ORDER = sorted(SCRIPTS, key=lambda name: (name not in FIRST, name))


@pytest.fixture(scope="module")
def smokes(
    tmp_path_factory: pytest.TempPathFactory, start_platform: Callable[..., Any]
) -> Mapping[str, tuple[int, str, Any]]:
    """Exit code, output and written JSON of each script, all run at once."""
    folder = tmp_path_factory.mktemp("smoke")
    platform = start_platform(folder / "run")
    model = {
        "argv": [str(BENCHMARKS / "rig/smoke.py"), str(folder)],
        "log": str(folder / "model.log"),
    }
    commands = [command_of(name, folder) for name in ORDER]
    (folder / "commands.json").write_text(json.dumps([[model], commands]))
    command = [sys.executable, str(BENCHMARKS / "rig/forked.py"), str(folder / "commands.json")]
    done = subprocess.run([*command, *WARM], cwd=ROOT, capture_output=True, text=True, check=False)
    platform.stop()
    print(done.stdout)  # times of all
    assert done.returncode == 0, done.stderr
    ended = [json.loads(line) for line in done.stdout.splitlines()]
    codes = {each["argv"][0]: each["code"] for each in ended}
    return {name: outcome(name, folder, codes[str(BENCHMARKS / name)]) for name in SCRIPTS}


def command_of(name: str, folder: Path) -> dict[str, Any]:
    own, *_ = written_by(name, folder)
    argv = [str(BENCHMARKS / name), "--smoke", str(folder), "--json", str(own)]
    return {"argv": argv, "log": str(own.with_suffix(".log"))}


def written_by(name: str, folder: Path) -> tuple[Path, Path]:
    """The JSON of a smoke, and its log."""
    own = folder / name.replace("/", "-").replace(".py", ".json")
    return own, own.with_suffix(".log")


def outcome(name: str, folder: Path, code: int) -> tuple[int, str, Any]:
    own, log = written_by(name, folder)
    said = json.loads(own.read_text()) if own.exists() else None
    return code, log.read_text()[-5000:], said


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_benchmark_still_runs(name: str, smokes: Mapping[str, tuple[int, str, Any]]) -> None:
    code, text, written = smokes[name]
    assert code == 0, text
    assert written, text
    path = RESULTS / f"{STORED.get(name, name.removesuffix('.py'))}.json"
    if path.exists():
        stored = json.loads(path.read_text())
        assert keys_of(stored) <= keys_of(written)
        if isinstance(stored, dict):
            for key in stored.keys() & written.keys():
                assert_rows_alike(written[key], stored[key])


def keys_of(content: Any) -> set[str]:
    return set(content if isinstance(content, dict) else content[0]) - BY_HAND


def assert_rows_alike(rows: Any, stored: Any) -> None:
    """Each row has the keys of a stored one."""
    if isinstance(rows, list) and all(isinstance(row, dict) for row in rows):
        known = [set(row) for row in stored]
        assert all(set(row) in known for row in rows), (rows, known)


def test_what_is_no_benchmark_is_started_by_one() -> None:
    """So that a program without a benchmark, or a benchmark without a smoke, is noticed."""
    for program, starter in PROGRAMS.items():
        assert (BENCHMARKS / program).exists(), program
        assert not starter or starter in SCRIPTS, (program, starter)


def test_a_network_was_there_or_the_results_say_why_not(
    smokes: Mapping[str, tuple[int, str, Any]],
) -> None:
    """Its programs are those of a fleet."""
    *_, written = smokes["broadcast.py"]
    rows = {row["scenario"] for row in written["rows"]}
    reason = Network.unavailable_reason()
    assert ("smoke" in rows, written.get("skipped")) == (not reason, reason or None)


def test_the_other_side_of_a_comparison_is_said_to_be_left_out(
    smokes: Mapping[str, tuple[int, str, Any]],
) -> None:
    for name in ("bench_trl.py", "step_beside_trl.py"):
        *_, written = smokes[name]
        assert written["not_run"]


def test_a_campaign_of_faults_injects_and_finds_nothing(
    smokes: Mapping[str, tuple[int, str, Any]],
) -> None:
    _, text, written = smokes["faults.py"]
    total = dict(written["total"])
    assert total.pop("injected") == sum(row["injected"] for row in written["kinds"].values())
    assert written["kinds"].keys() >= set(FAULTS)
    assert (written["without_target"], written["left_out"]) == ([], []), text
    assert not any(total.values()), text
    assert written["restarts"]["trainer"]["measured"], text
    assert (len(written["named"]), written["not_named"]) == (written["named_s"]["measured"], [])
    assert written["named"], text
