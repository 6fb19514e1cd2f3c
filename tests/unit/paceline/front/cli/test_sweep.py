"""A sweep: its settings and seeds, and how it compares what they came to."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from paceline.enums import JobState, Purpose
from paceline.errors import ConfigError, InvalidError
from paceline.front.api.documents import MetricRow
from paceline.front.cli.entry import parser
from paceline.front.cli.sweep import SweptJob, SweptSetting, comparison, planned, spread
from paceline.front.cli.terminal.console import SafeConsole
from paceline.front.client.curves import figure, group_curves

SPEC = {
    "name": "tiny",
    "model": {"path": "model"},
    "tasks": {"environment": "arithmetic", "seed": 7},
    "reward": [{"kind": "exact"}],
}


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job file next to a folder that looks like a model."""
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    for name in ("config.json", "tokenizer.json"):
        Path("model", name).write_text("{}")
    Path("job.yaml").write_text(yaml.safe_dump(SPEC))
    return Path("job.yaml")


def settings(job: Path, *words: str) -> list[SweptSetting]:
    return list(planned(parser().parse_args(["sweep", str(job), *words])))


def test_every_choice_of_values_has_a_name_that_its_seeds_share(job: Path) -> None:
    words = ["--set", "trainer.optimizer.lr=1e-4, 3e-5", "--set", "stop.steps=5"]
    found = settings(job, "--seeds", "3", *words, "--set", "experience.max_staleness=0,4")
    assert [each.name for each in found] == [
        "tiny-lr-1e-4-max-staleness-0",
        "tiny-lr-1e-4-max-staleness-4",
        "tiny-lr-3e-5-max-staleness-0",
        "tiny-lr-3e-5-max-staleness-4",
    ]
    assert found[2].label == "trainer.optimizer.lr=3e-5, experience.max_staleness=0"
    for each in found:
        assert [spec.tasks.seed for spec in each.specs] == [7, 8, 9]
        assert {spec.name for spec in each.specs} == {each.name}
        assert {spec.stop.steps for spec in each.specs} == {5}
    assert found[2].specs[0].trainer.optimizer.lr == 3e-5
    (alone,) = settings(job, "--seeds", "2")
    assert (alone.label, alone.name) == ("tiny", "tiny")


def test_settings_that_would_share_a_name_do_not(job: Path) -> None:
    kinds = "reward=[{kind: exact}],[{kind: exact, weight: 0.5}]"
    found = settings(job, "--set", kinds, "--set", "name=" + "a" * 45)
    assert len({each.name for each in found}) == 2
    assert all(len(each.name) <= 53 for each in found)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--set", "stop.steps=5,many"], "stop.steps: Input should be a valid integer"),
        (["--set", "stop.steps"], "write FIELD=VALUE, or FIELD=VALUE,VALUE to compare"),
        (["--seeds", "0"], "--seeds: 0 is not allowed; at least 1"),
        (["--seeds", "200", "--set", "stop.steps=5,6"], "400 jobs; a sweep has at most 256"),
    ],
)
def test_nothing_starts_if_a_job_is_wrong(job: Path, words: list[str], says: str) -> None:
    with pytest.raises((ConfigError, InvalidError), match=says):
        settings(job, *words)


def test_the_comparison_has_mean_and_spread(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    rewards = ((0.5, 0.25), (0.75, 0.5), (None, None))
    jobs = [SweptJob(f"a-{n}", JobState.SUCCEEDED, *each) for n, each in enumerate(rewards)]
    failed = SweptJob("b", JobState.FAILED, None, None)
    settings = [SweptSetting("tiny", f"steps={n}", f"tiny-steps-{n}", ()) for n in (5, 6)]
    SafeConsole().print(comparison(settings, [jobs, [failed]]))
    shown = capsys.readouterr().out
    assert "0.625 ± 0.177" in shown
    assert [line.split()[:4] for line in shown.splitlines()[1:3]] == [
        ["steps=5", "3", "of", "3"],
        ["steps=6", "0", "of", "1"],
    ]
    assert (spread([0.5]), spread([])) == ("0.500", "-")


def test_a_group_is_drawn_where_all_runs_are(tmp_path: Path) -> None:
    def run(*rewards: float) -> list[MetricRow]:
        return [
            MetricRow(index=n, step=n, kind=Purpose.TRAIN, values={"reward_mean": value})
            for n, value in enumerate(rewards, 1)
        ]

    (found,) = group_curves([run(0.0, 0.5, 1.0), run(1.0, 0.5)], "reward")
    assert (found.label, found.steps, found.means) == ("training", (1, 2), (0.5, 0.5))
    assert found.spreads == (pytest.approx(0.7071, abs=1e-4), 0.0)
    drawn = figure({}, groups={"a": [run(0.0, 0.5), run(1.0, 0.5)]})
    (axes,) = drawn.axes
    assert axes.get_legend_handles_labels()[1] == ["a: training, 2 runs"]
    assert len(axes.collections) == 1  # the band
