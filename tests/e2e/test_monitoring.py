"""A real Prometheus with the files of `paceline up`: dashboards and alerts find their series."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.config.quota import Quota
from paceline.errors import StateError
from paceline.platform.telemetry.metric_names import NAMES
from paceline_harness.monitoring.dashboards import (
    Asked,
    Selector,
    alert_queries,
    board_queries,
    recorded,
    selectors,
)
from paceline_harness.monitoring.prometheus import MISSING, Prometheus, installed
from paceline_harness.monitoring.series import MOST_SERIES, SAYS
from paceline_harness.patience import PATIENCE_S

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not installed(), reason=MISSING),
    pytest.mark.timeout(1500),
]

QUIET_S = 120.0
"""Seconds in which no more queries are answered until the others count as missing.

The job makes about a step a second, and is scraped as often: this is for a machine that is a
hundred times slower.
"""
SHARED = {"gateway", "controller", "experience", "environment", "reward"}
OF_A_JOB = {"trainer", "rollout"}

# Not in this run, and why. A query that reads one of these may find nothing; all others have to.
NO_GPU = "there is no accelerator"
NO_TROUBLE = "a counter of troubles appears with the first one"
ABSENT = {
    "paceline_mfu_ratio": NO_GPU,
    "paceline_accelerator_memory_bytes": NO_GPU,
    "paceline_weight_events_total": NO_TROUBLE,
    "paceline_leases_expired_total": NO_TROUBLE,
    "paceline_store_losses_total": NO_TROUBLE,
    "paceline_given_back_episodes_total": NO_TROUBLE,
    "paceline_resumed_tokens_total": NO_TROUBLE,
    "paceline_lost_tokens_total": NO_TROUBLE,
    "paceline_restarts_total": NO_TROUBLE,
    "paceline_refused_calls_total": NO_TROUBLE,
    "paceline_access_refusals_total": "nobody has tried to get in without a token",
    "paceline_tracking_errors_total": NO_TROUBLE,
    "paceline_tracking_lag_seconds": "the job names no tracker",
    "paceline_spans_total": "no collector is set up",
    "paceline_queued_tokens": "no turn has had to wait for room",
    "ALERTS": "nothing is wrong",
}


@pytest.fixture(scope="module")
def job(platform: Any, tiny_job: Callable[..., Any]) -> Iterator[str]:
    """A job that runs until the tests of this module have finished, about a step a second."""
    spec = tiny_job(
        name="monitored",
        tasks={"environment": "quiz", "options": {"turns": 1, "pause_s": 4.0}},
        # A part of the groups is all right or all wrong.
        reward=[{"kind": "regex", "pattern": "^[^0-4]*$"}],
        stop={"steps": 100_000},
        rollout={"replicas": 2, "scaling": {"min_replicas": 2, "max_replicas": 2}},
        experience={
            **dict.fromkeys(("batch_groups", "group_size"), 4),
            "lease_s": 3.0,
            "filters": [{"kind": "zero_variance"}],
        },
    )
    with platform.client() as client:
        client.set_quota("default", quota=Quota(jobs=100, rollout_workers=100, episodes=10_000))
        job_id = client.submit(spec).status.job_id
        yield job_id
        with contextlib.suppress(StateError):  # the last test has ended it
            client.cancel(job_id)


@pytest.fixture(scope="module")
def server(
    platform: Any, job: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    """Prometheus with the run directory's configuration, but faster; the job has been evaluated."""
    folder: Path = platform.run_dir / "monitoring"
    config = folder / "faster.yml"
    config.write_text((folder / "prometheus.yml").read_text().replace("5s", "1s"))
    with Prometheus(folder=tmp_path_factory.mktemp("prometheus"), config=config) as made:
        evaluated = f'paceline_reward_mean{{job="{job}", purpose="eval"}}'
        made.until(evaluated, bool, timeout_s=PATIENCE_S)
        yield made


def targets_of(server: Prometheus, service: str) -> list[dict[str, str]]:
    """Labels of all targets, whether they answered in time or not."""
    found = [target["labels"] for target in server.targets()]
    return [labels for labels in found if labels["service"] == service]


def services(server: Prometheus) -> Counter[str]:
    """Number of healthy targets by their `service` label."""
    up = [target for target in server.targets() if target["health"] == "up"]
    return Counter(target["labels"]["service"] for target in up)


def test_every_process_is_scraped(
    server: Prometheus, platform: Any, job: str, until: Callable[..., None]
) -> None:
    wanted = Counter({**dict.fromkeys(SHARED | OF_A_JOB, 1), "rollout": 2})
    until(lambda: services(server) == wanted, "some do not answer", PATIENCE_S)
    for service in OF_A_JOB:
        for labels in targets_of(server, service):
            assert labels["job"] == job
    # A scrape that comes too late leaves a gap.
    server.until(
        "paceline_build_info",
        lambda found: {sample.labels["service"] for sample in found} == SHARED | OF_A_JOB,
        timeout_s=PATIENCE_S,
    )


def test_a_worker_exports_at_most_the_counted_series(server: Prometheus) -> None:
    """`test_cardinality.py` counts everything in the table."""
    for kind, says in SAYS.items():
        scraped_of = targets_of(server, kind)
        assert scraped_of, f"nothing of {kind}"
        for labels in scraped_of:
            at = f'instance="{labels["instance"]}"'
            found = server.until(f'{{__name__=~"paceline_.*", {at}}}', bool, timeout_s=PATIENCE_S)
            told = {sample.labels["__name__"] for sample in found}
            assert told <= {NAMES[name].name for name in says}, kind
            (scraped,) = server.query(f"scrape_samples_scraped{{{at}}}")
            assert scraped.value <= MOST_SERIES


def read_by(expr: str) -> Iterator[Selector]:
    """Series that an expression reads, also through recording rules."""
    for one in selectors(expr):
        yield one
        for recorded_as in recorded().get(one.metric, ()):
            # A rule may read series of its own name that another one makes.
            if one.metric not in {below.metric for below in selectors(recorded_as)}:
                yield from read_by(recorded_as)


def may_be_empty(asked: Asked) -> bool:
    return any(selector.metric in ABSENT for selector in read_by(asked.expr))


def is_answered(server: Prometheus, asked: Asked) -> bool:
    """Whether there is data, some of it with all labels in the panel's legend."""
    found = server.query(asked.expr)
    return bool(found) and all(any(s.labels.get(name) for s in found) for name in asked.shown)


def unanswered(server: Prometheus, wanted: Iterable[Asked]) -> list[Asked]:
    """Queries that get no answer, though others have had theirs for `QUIET_S`."""
    left, since = list(wanted), time.monotonic()
    while left and time.monotonic() - since < QUIET_S:
        still = [asked for asked in left if not is_answered(server, asked)]
        if len(still) < len(left):
            since = time.monotonic()
        left = still
        time.sleep(1.0 if left else 0.0)
    return left


def test_every_query_of_the_dashboards_finds_data(server: Prometheus) -> None:
    asked = list(board_queries())
    wanted = [one for one in asked if not may_be_empty(one)]
    assert len(wanted) > 100
    assert unanswered(server, wanted) == []
    for one in asked:
        server.query(one.expr)  # those that may be empty are at least understood


def calm(selector: Selector) -> str:
    """The selector without labels of failures, whose series only exist after a failure."""
    kept = tuple(
        pair for pair in selector.equal if pair[0] not in {"event", "reason", "waiting_on"}
    )
    return Selector(selector.metric, selector.labels, kept).text


def test_every_alert_reads_existing_series(server: Prometheus) -> None:
    read = {
        selector
        for asked in alert_queries()
        for selector in read_by(asked.expr)
        if selector.metric not in ABSENT
    }
    series = [Asked(selector.metric, calm(selector)) for selector in read]
    assert len(series) > 20
    assert unanswered(server, series) == []


def rules_of(server: Prometheus) -> list[dict[str, Any]]:
    return [rule for group in server.rule_groups() for rule in group["rules"]]


def test_rules_are_evaluated_and_nothing_is_wrong(
    server: Prometheus, until: Callable[..., None]
) -> None:
    assert {rule["name"] for rule in rules_of(server)} == {
        *recorded(),
        *(asked.place for asked in alert_queries()),
    }
    # Each is unknown until its turn has come for the first time.
    until(lambda: all(rule["health"] != "unknown" for rule in rules_of(server)), "not evaluated")
    for rule in rules_of(server):
        assert rule["health"] == "ok", rule
    firing = [a["labels"] for a in server.alerts() if a["state"] == "firing"]
    assert [labels for labels in firing if labels["severity"] == "critical"] == []


def test_a_query_for_a_metric_that_is_gone_is_noticed(server: Prometheus) -> None:
    assert not is_answered(server, Asked("renamed", "paceline_busy_secs_total"))
    assert not is_answered(server, Asked("labels", "paceline_step", frozenset({"service_kind"})))


def test_ended_workers_are_no_longer_targets(
    server: Prometheus, platform: Any, job: str, until: Callable[..., None]
) -> None:
    with platform.client() as client:
        client.cancel(job)
        assert client.wait(job, timeout_s=PATIENCE_S).status.state == "cancelled"
    folder = platform.run_dir / "monitoring" / "targets"
    until(lambda: not list(folder.glob("rollout*")), "targets are still told", PATIENCE_S)
    until(
        lambda: not {t["labels"]["service"] for t in server.targets()} & OF_A_JOB,
        "targets are still scraped",
        PATIENCE_S,
    )
