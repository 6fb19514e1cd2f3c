"""Every alert fires exactly when it should, and has a runbook."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.platform.telemetry.monitoring import RULES
from paceline_harness.monitoring.prometheus import MISSING, installed
from paceline_harness.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
CASES: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "alerts.yaml").read_text())
ALERTS: dict[str, dict[str, Any]] = {
    rule["alert"]: rule
    for path in sorted(RULES.glob("*.yaml"))
    for group in yaml.safe_load(path.read_text())["groups"]
    for rule in group["rules"]
    if "alert" in rule
}
RUNBOOKS = (ROOT / "docs" / "runbooks.md").read_text()
SECTIONS = dict(re.findall(r"^## (Paceline\w+)\n(.*?)(?=^## |\Z)", RUNBOOKS, re.DOTALL | re.M))
needs_promtool = pytest.mark.skipif(not installed("promtool"), reason=MISSING)


def promtool(*arguments: str) -> str:
    command = ["promtool", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_promtool
def test_rules_are_sound() -> None:
    promtool(
        "check", "rules", "--lint-fatal", *(str(path) for path in sorted(RULES.glob("*.yaml")))
    )


def test_every_alert_has_cases() -> None:
    assert set(CASES) == set(ALERTS)
    for case in CASES.values():
        assert case["quiet"]


@needs_promtool
@pytest.mark.parametrize("name", CASES)
def test_fires_when_it_should_and_only_then(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    cases = [
        (fires["series"], [told(name, fires)]) for fires in [case["fires"], *case.get("also", [])]
    ]
    run(tmp_path, name, case["at"], [*cases, *((series, []) for series in case["quiet"])])


def told(name: str, fires: dict[str, Any]) -> dict[str, Any]:
    """The alert that is expected."""
    return {
        "exp_labels": fires["labels"] | ALERTS[name]["labels"],
        "exp_annotations": ALERTS[name]["annotations"] | {"summary": fires["summary"]},
    }


def run(folder: Path, name: str, at: str, cases: list[tuple[dict[str, str], list[Any]]]) -> None:
    """Let promtool check that these series trigger these alerts."""
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": s, "values": values} for s, values in series.items()],
            "alert_rule_test": [{"alertname": name, "eval_time": at, "exp_alerts": expected}],
        }
        for series, expected in cases
    ]
    path = folder / "test.yaml"
    rules = [str(RULES / "alerts.yaml")]
    path.write_text(
        yaml.safe_dump({"rule_files": rules, "evaluation_interval": "1m", "tests": tests})
    )
    promtool("test", "rules", str(path))


@needs_promtool
def test_a_wrong_expectation_is_seen(tmp_path: Path) -> None:
    series = CASES["PacelineLedgerInconsistent"]["fires"]["series"]
    with pytest.raises(AssertionError, match="PacelineLedgerInconsistent"):
        run(tmp_path, "PacelineLedgerInconsistent", "5m", [(series, [])])


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    assert set(SECTIONS) == set(ALERTS)
    for name, text in SECTIONS.items():
        for part in ("**Means.**", "**See.**", "**Do.**"):
            assert part in text, f"{name}: no {part}"


@pytest.mark.parametrize("name", ALERTS)
def test_alerts_have_a_summary_and_a_runbook(name: str) -> None:
    rule = ALERTS[name]
    assert name.startswith("Paceline")
    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert "{{" in rule["annotations"]["summary"]
    assert rule["annotations"]["runbook_url"] == f"docs/runbooks.md#{name.lower()}"
