"""`paceline top`: jobs, services, and who waits for whom."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from paceline.enums import WorkerKind
from paceline.errors import ConfigError, DeadlineError, UnavailableError
from paceline.front.api.activity import Activity, JobActivity, ProcessActivity
from paceline.front.api.blame import Attribution, ServiceUse, attribute
from paceline.front.api.documents import ActivityView
from paceline.front.cli.entry import Exit
from paceline.front.cli.target.clients import reader_of
from paceline.front.cli.terminal.console import SafeConsole
from paceline.front.cli.terminal.printing import say
from paceline.front.cli.terminal.tables import Column, FittingTable
from paceline.front.client.client import Client
from paceline.platform.text import visible

_LEAST_S = 0.5
_LEAST_SHARE = 0.005
_JSON = TypeAdapter(Activity)
_REWARD = "-"


def top(arguments: Namespace) -> int:
    """`paceline top`."""
    if arguments.interval < _LEAST_S:
        raise ConfigError(f"--interval: at least {_LEAST_S:g}")
    console = SafeConsole()
    live = console.is_terminal and not (arguments.once or arguments.json)
    with reader_of(arguments) as client:
        if live:
            _watch(client, arguments, console)
            return Exit.OK
        for now, attribution in _intervals(client, arguments):
            if arguments.json:
                say(json.dumps(as_json(now, attribution)))
            else:
                console.print(screen(now, attribution))
            if arguments.once:
                break
    return Exit.OK


def _watch(client: Client, arguments: Namespace, console: Console) -> None:
    with Live(console=console, screen=True, auto_refresh=False) as shown:
        shown.update(Text("measuring …"), refresh=True)
        for now, attribution in _intervals(client, arguments, tell=_teller(shown)):
            shown.update(screen(now, attribution), refresh=True)


def _teller(shown: Live) -> Callable[[str], None]:
    return lambda what: shown.update(Text(visible(what), "red"), refresh=True)


def _intervals(
    client: Client, arguments: Namespace, *, tell: Callable[[str], None] | None = None
) -> Iterator[tuple[Activity, Attribution]]:
    """Each interval; with `tell`, an unreachable gateway is reported and asked again."""
    before: Activity | None = None
    while True:
        try:
            now = activity_of(client.get_activity(tenant=arguments.tenant))
            if before is not None and (attribution := attribute(before, now)) is not None:
                yield now, attribution
            before = now
        except (UnavailableError, DeadlineError) as error:
            if tell is None:
                raise
            before = None
            tell(error.message)
        time.sleep(arguments.interval)


def activity_of(view: ActivityView) -> Activity:
    """The snapshot in a reply."""
    return Activity(
        clock_s=view.clock_s,
        jobs=tuple(view.jobs),
        processes=tuple(view.processes),
        more_jobs=view.more_jobs,
        processes_left_out=view.processes_left_out,
    )


def as_json(now: Activity, attribution: Attribution) -> dict[str, Any]:
    """The snapshot, and what the interval before it says."""
    return {
        **_JSON.dump_python(now, mode="json"),
        "bottleneck": attribution.bottleneck,
        "scores": attribution.scores,
        "services": [{**asdict(service), "busy": service.busy} for service in attribution.services],
        "job_waits": attribution.waits,
        "tokens_per_s": attribution.tokens_per_s,
    }


def screen(now: Activity, attribution: Attribution) -> RenderableType:
    """Jobs, services and the bottleneck, one table each."""
    total = sum(attribution.tokens_per_s.values())
    head = Text(f"{len(now.jobs)}{'+' if now.more_jobs else ''} jobs   {total:,.0f} tokens/s   ")
    if attribution.bottleneck:
        share = attribution.scores[attribution.bottleneck]
        head.append("everything waits for ")
        head.append(attribution.bottleneck, "bold red")
        head.append(f" ({share:.0%} of the time)")
    else:
        head.append("nothing is waited for")
    return Group(
        head, Text(), jobs_table(now, attribution), Text(), services_table(now, attribution)
    )


def jobs_table(now: Activity, attribution: Attribution) -> FittingTable:
    """One row per unfinished job."""
    table = FittingTable(
        *("job", "state", "step", "reward", Column("tokens/s", 2), Column("stale", 4)),
        *(Column("leased", 5), Column("groups", 3), Column("waits for", 1, is_long=True)),
    )
    for job in now.jobs:
        table.add_row(*_job(job, attribution))
    if not now.jobs:
        table.add_row("no unfinished job")
    return table


def _job(job: JobActivity, attribution: Attribution) -> tuple[str, ...]:
    status = job.status
    steps = f"{status.step}/{job.target_steps}" if job.target_steps else str(status.step)
    rate = attribution.tokens_per_s.get(status.job_id)
    state = "held" if job.held else status.state.value
    at_bound = (
        " (at the bound of staleness)" if job.ready_groups and not job.headroom_groups else ""
    )
    return (
        visible(status.job_id),
        state,
        steps,
        _REWARD if job.reward is None else f"{job.reward:.3f}",
        _REWARD if rate is None else f"{rate:,.0f}",
        f"{job.staleness:.2f}",
        str(job.leased),
        f"{job.ready_groups} ready, {job.open_groups} open",
        visible(status.reason) or _shares(attribution.waits.get(status.job_id, {})) + at_bound,
    )


def services_table(now: Activity, attribution: Attribution) -> FittingTable:
    """One row per kind of service, with what it waits for and what waits for it."""
    table = FittingTable(
        *("service", Column("processes", 1), "busy", Column("stalled", 2)),
        *(Column("load", 4, is_long=True), Column("waits for", 3, is_long=True), "cost"),
    )
    for service in attribution.services:
        row = _service(service, now, attribution)
        table.add_row(*row, style="bold red" if service.kind == attribution.bottleneck else "")
    for name in ("store", "weights"):
        if attribution.scores.get(name, 0.0) > _LEAST_SHARE:
            style = "bold red" if name == attribution.bottleneck else ""
            table.add_row(name, "", "", "", "", "", f"{attribution.scores[name]:.0%}", style=style)
    return table


def _service(service: ServiceUse, now: Activity, attribution: Attribution) -> tuple[str, ...]:
    mine = [process for process in now.processes if process.kind.value == service.kind]
    return (
        service.kind,
        str(service.processes),
        f"{service.busy:.0%}",
        f"{service.stalled:.0%}" if service.stalled > _LEAST_SHARE else "",
        _load(service.kind, mine),
        _counts(service.waits),
        f"{attribution.scores.get(service.kind, 0.0):.0%}",
    )


def _load(kind: str, processes: list[ProcessActivity]) -> str:
    """The load that a kind of worker reports, where the caller may see it."""

    def total(name: str) -> float:
        return sum(process.load.get(name, 0.0) for process in processes)

    if not any(process.load for process in processes):
        return ""
    if kind == WorkerKind.ROLLOUT:
        newest = max((process.active_version for process in processes), default=-1)
        oldest = min((process.active_version for process in processes), default=-1)
        versions = f"v{newest}" if newest == oldest else f"v{oldest}-v{newest}"
        return f"{total('running'):.0f} running, {total('waiting'):.0f} queued, {versions}"
    if kind == WorkerKind.ENVIRONMENT:
        open_slots = sum(process.capacity for process in processes)
        return f"{total('open'):.0f} of {open_slots:.0f} slots"
    return f"{total('pending'):.0f} pending" if kind == WorkerKind.REWARD else ""


def _shares(waits: Mapping[str, float]) -> str:
    largest = sorted(waits.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {share:.0%}" for name, share in largest if share > _LEAST_SHARE)


def _counts(waits: Mapping[str, float]) -> str:
    largest = sorted(waits.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {count:.1f}" for name, count in largest if count > _LEAST_SHARE)
