"""Tables keep what matters on a terminal of 80 columns."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console, RenderableType

from paceline.config.quota import Quota
from paceline.enums import AuditOutcome, JobState, Purpose, ScoreStatus, WorkerKind
from paceline.front.api.activity import Activity, JobActivity, ProcessActivity
from paceline.front.api.blame import attribute
from paceline.front.api.documents import (
    AuditEntryView,
    ListedJob,
    PrincipalView,
    TenantView,
    TokenView,
)
from paceline.front.api.episodes import ListedEpisode
from paceline.front.api.tenants import SIZES, TenantUsage
from paceline.front.cli.administration.access import audit_table, token_table
from paceline.front.cli.administration.tenants import count_table, size_table
from paceline.front.cli.data import length_table
from paceline.front.cli.remote import job_table
from paceline.front.cli.terminal.tables import Column, FittingTable
from paceline.front.cli.top import screen
from paceline.front.cli.trajectories import table_of
from paceline.platform.transport.principal import Role
from paceline.types import JobStatus

JOB = "arithmetic-7c367f"


def lines(shown: RenderableType, width: int = 80) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width).print(shown)
    found = file.getvalue().splitlines()
    assert max(map(len, found)) <= width
    return [line.rstrip() for line in found]


def episodes() -> RenderableType:
    each = ListedEpisode(
        *(f"{JOB}.179", 3, 1, "t", Purpose.TRAIN, 1020, 0.875),
        parts={"exact": 1.0, "format": 0.25},
        status=ScoreStatus.TIMEOUT,
        advantage=-1.25,
        age=4,
        policy_tokens=1234,
        turns=12,
        text="The answer is 42, " * 9,
    )
    return table_of([each])


def audit() -> RenderableType:
    who = PrincipalView.model_validate(
        {
            "token_id": "t-1",
            "name": "bootstrap",
            "role": "admin",
            "source": "127.0.0.1",
            "tenant": "*",
        }
    )
    entry = AuditEntryView(
        id="1",
        time="2026-11-29T10:18:38Z",
        principal=who,
        action="quota.set",
        tenant="research",
        target="research",
        outcome=AuditOutcome.REFUSED,
        detail="episodes: 12 is above what the installation allows",
        count=3,
    )
    digest = entry.model_copy(update={"action": "code.upload", "target": "7c" * 32})
    return audit_table([entry, digest])


def tokens() -> RenderableType:
    token = TokenView(
        token_id="tk-0123456789ab",
        name="continuous-integration",
        tenant="research",
        role=Role.SUBMIT,
        age_s=86_400 * 9,
        expires_in_s=86_400 * 3,
        used_s=7200,
        revoked=False,
        created_by="bootstrap",
        no_code=True,
    )
    return token_table([token])


def tenant() -> TenantView:
    sizes = dict.fromkeys(SIZES, 12345)
    usage = TenantUsage(12, 4, 16, 4096, 7 << 30, **sizes)
    return TenantView(
        name="research", quota=Quota(submitted=100, jobs=8), is_custom=True, usage=usage
    )


def jobs() -> RenderableType:
    status = JobStatus(
        job_id=f"{'long-' * 8}7c367f",
        name="long-" * 8,
        tenant="a",
        state=JobState.RUNNING,
        step=12_345,
        eval_reward=0.125,
        age_s=123_456.0,
    )
    return job_table([ListedJob(status=status)])


def activity() -> RenderableType:
    status = JobStatus(job_id=JOB, name="a", tenant="a", state=JobState.RUNNING, step=12_345)
    job = JobActivity(status, target_steps=100_000, reward=0.625, ready_groups=12, open_groups=345)
    load = {"running": 512.0, "waiting": 12.0}
    process = ProcessActivity("w", WorkerKind.ROLLOUT, JOB, capacity=512.0, load=load)
    before, now = (Activity(at, (job,), (process,)) for at in (1.0, 2.0))
    found = attribute(before, now)
    assert found is not None
    return screen(now, found)


@pytest.mark.parametrize(
    ("table", "wanted"),
    [
        (episodes, [f"{JOB}.179/3", "1020", "0.875", "-1.25", "timeout", "The answer is"]),
        (audit, ["2026-11-29T10:18:38Z", "bootstrap", "code.upload", "research", "refused"]),
        (tokens, ["tk-0123456789ab", "continuous-integration", "submit, no code", "in 3 d"]),
        (lambda: count_table([tenant()]), ["research", "12 of 100", "4 of 8", "16 of any"]),
        (lambda: size_table([tenant()]), ["research", "trajectory", "12.1 KiB of"]),
        (jobs, [f"{'long-' * 8}7c367f", "running", "12345", "0.125"]),
        (activity, [JOB, "running", "12345/100000", "0.625", "rollout"]),
        (
            lambda: length_table([("training", [12_345] * 20)], max_context=8192, most=4096),
            ["training", "12345", "20 (100.0%)", "over 4096", "over 8192"],
        ),
    ],
)
def test_a_narrow_terminal_shows_what_matters_whole(table: Any, wanted: list[str]) -> None:
    found = lines(table())
    for text in wanted:
        assert any(text in line for line in found), (text, found)


def test_what_does_not_fit_is_named_and_wide_terminals_have_it() -> None:
    table = FittingTable("id", Column("note", 2), Column("why", 1, is_long=True))
    table.add_row("a" * 30, "b" * 40, "one two three four five six seven eight nine ten")
    assert lines(table, 200)[1].endswith("ten")
    narrow = lines(table)
    assert "not shown in 80 columns: note" in narrow
    assert "".join(narrow).count("ten") == 1  # the long text wraps instead
    assert lines(table, 40)[-1] == "not shown in 40 columns: note, why"


def test_brackets_of_users_are_no_markup() -> None:
    table = FittingTable("name")
    table.add_row("[bold]mine[/bold]")
    assert "[bold]mine[/bold]" in lines(table)


def test_the_widest_column_gives_way_where_not_even_what_matters_fits() -> None:
    table = FittingTable("id", "what", "state")
    table.add_row("j-1", "x" * 200, "running")
    head, first, *_ = lines(table)
    assert head.split() == ["id", "what", "state"]
    assert (first.split()[0], first.split()[2]) == ("j-1", "running")
