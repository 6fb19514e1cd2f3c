"""Commands that run everything on this machine: `up`, `run`."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import threading
from argparse import Namespace
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from paceline.config import JobSpec, parse_job
from paceline.config.limits import LimitSettings
from paceline.config.load import load, validate
from paceline.config.precision import with_dtype
from paceline.config.sections.endpoints import EndpointSettings
from paceline.config.service import (
    EndpointsFile,
    LimitsFile,
    LogSettings,
    PoolsFile,
    TracingSettings,
    WorldsFile,
)
from paceline.config.tokenizers import TokenizerSettings
from paceline.data.job_data import EVERYWHERE
from paceline.enums import JobState, WorkerKind
from paceline.errors import InvalidError, PacelineError, StateError
from paceline.front.api.documents import JobView
from paceline.front.api.notebook import flattened
from paceline.front.cli.check import (
    allowed_targets,
    check_all,
    check_endpoints,
    plugin_settings,
    read_job,
)
from paceline.front.cli.entry import Exit
from paceline.front.cli.export import models_of
from paceline.front.cli.pausing import follow_or_pause, resume
from paceline.front.cli.remote import all_jobs, verdict
from paceline.front.cli.target.run_dirs import DEFAULT_RUN_DIR, named_run_dir, remember
from paceline.front.cli.terminal.printing import say
from paceline.front.client.client import Client
from paceline.front.local.devices.report import plan_here
from paceline.front.local.supervisor import Local
from paceline.platform.files import TOKEN_FILE, private_files, read_json
from paceline.platform.telemetry import logs

RESULTS = ("summary.json", "metrics.jsonl")
_SHOWN = 3  # fields
LIVE = [state.value for state in JobState if not state.terminal]


def up(arguments: Namespace) -> int:
    """`paceline up`: serve until interrupted."""
    run_dir = named_run_dir(arguments) or DEFAULT_RUN_DIR
    with running(run_dir, arguments) as local, contextlib.suppress(KeyboardInterrupt):
        remember(run_dir)
        say(f"serving at {local.url} (API docs at {local.url}/docs), files in {run_dir}")
        say(f"the API token is in {run_dir / TOKEN_FILE}, where paceline commands find it")
        say("stop with Ctrl-C")
        threading.Event().wait()
    return Exit.OK


def run(arguments: Namespace) -> int:
    """`paceline run JOB.yaml`: start the services, run the job, stop the services."""
    spec = with_dtype(read_job(arguments.job_file, arguments.overrides, arguments.data), "auto")
    run_dir = named_run_dir(arguments) or Path("runs") / spec.name
    if not arguments.again:
        _check_unfinished(run_dir)
    check_endpoints(spec, arguments.endpoints)
    check_all(spec, allowed_targets(arguments))
    _place(spec, quiet=arguments.quiet)
    with (
        running(run_dir, arguments) as local,
        Client(local.url, token=local.token) as client,
    ):
        remember(run_dir)
        prepared = client.send_files(spec)
        if prepared is not spec:  # the digests tell whether a job is the same
            spec = parse_job(prepared)
        job_id = _resumed(client, spec)
        if not job_id:
            if not arguments.again:
                _check_finished(run_dir)
            say("submitting the job; its model is tried first", error=True)
            job_id = client.submit(spec).status.job_id
        if not arguments.quiet:
            say(f"job {job_id}; logs are in {run_dir / 'logs'}, and `paceline top` shows more")
        job = follow_or_pause(client, job_id, quiet=arguments.quiet)
    collect(run_dir, job)
    code = verdict(job)
    if code == Exit.OK:
        say(f"{job_id} succeeded; results in {run_dir}")
    return code


def _place(spec: JobSpec, *, quiet: bool) -> None:
    """Say which GPUs the job gets; raise `InvalidError` if this machine has too few."""
    planned = plan_here(spec)
    if planned is None:
        return
    if planned.refusal:
        raise InvalidError(f"devices: {planned.refusal}")
    for line in () if quiet else planned.lines():
        say(line)


def _check_unfinished(run_dir: Path) -> None:
    """Raise `StateError` if the newest job here has succeeded and none is left to resume."""
    summaries = _summaries(run_dir)
    if summaries and all(summaries.values()):
        _check_finished(run_dir)


def _check_finished(run_dir: Path) -> None:
    """Raise `StateError` if the newest job here that has ended has succeeded."""
    ended = {folder: summary for folder, summary in _summaries(run_dir).items() if summary}
    if not ended:
        return
    newest = max(ended, key=lambda folder: (folder / "summary.json").stat().st_mtime)
    if ended[newest].get("state") == JobState.SUCCEEDED:
        raise StateError(
            f"{run_dir} has the results of job {newest.name}, which has succeeded; "
            "choose another --run-dir, or train again here with --again"
        )


def _summaries(run_dir: Path) -> dict[Path, dict[str, Any]]:
    """Summaries of all jobs by folder; empty if a job has not ended."""
    folders = [path for path in (run_dir / "jobs").glob("*/") if path.is_dir()]
    return {path: read_json(path / "summary.json") or {} for path in folders}


def collect(run_dir: Path, job: JobView) -> None:
    """Copy a job's results to the top of the run directory and plot its rewards."""
    folder = run_dir / "jobs" / job.status.job_id
    for name in RESULTS:
        if (folder / name).exists():
            shutil.copyfile(folder / name, run_dir / name)
    if not (folder / "summary.json").exists():
        (run_dir / "summary.json").write_text(json.dumps(job.status.summary, indent=1))
    if (run_dir / "metrics.jsonl").exists():
        from paceline.front.cli.report import draw_rewards, read_metrics

        rows = read_metrics(run_dir / "metrics.jsonl")
        draw_rewards(rows, run_dir / "reward.png", title=job.status.name)


@contextlib.contextmanager
def running(
    run_dir: Path, arguments: Namespace, *, endpoints: Mapping[str, EndpointSettings] | None = None
) -> Generator[Local]:
    """Run all services for the duration of the context; `endpoints` replace those of the file.

    Files that they, the store and their children create are readable by the owner only.
    """
    with private_files(), _running(run_dir, arguments, endpoints) as local:
        yield local


@contextlib.contextmanager
def _running(
    run_dir: Path, arguments: Namespace, endpoints: Mapping[str, EndpointSettings] | None
) -> Generator[Local]:
    logs.setup(LogSettings(path=run_dir / "logs" / "up.log"))
    local = Local(
        run_dir,
        http_port=arguments.port,
        store_url=arguments.store,
        tracing=_tracing(arguments),
        options=_options(arguments, endpoints),
        limits=_limits(arguments),
        tokenizers=TokenizerSettings(run_in=arguments.tokenizers),
        models=models_of(arguments),
        plugins=plugin_settings(arguments),
        storage=arguments.storage,
    )
    say("starting services", error=True)
    local.start()
    try:
        yield local
    finally:
        # A second Ctrl-C during shutdown would leave processes behind.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        say("stopping", error=True)
        local.stop()
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _options(
    arguments: Namespace, endpoints: Mapping[str, EndpointSettings] | None
) -> dict[WorkerKind, dict[str, Any]]:
    files = (
        (PoolsFile, arguments.pools),
        (WorldsFile, arguments.worlds),
        (EndpointsFile, arguments.endpoints),
    )
    options: dict[str, Any] = {}
    for model, path in files:
        if path is not None:
            options |= load(model, path).model_dump(mode="json")
    if endpoints is not None:
        options["endpoints"] = {
            name: endpoint.model_dump(mode="json") for name, endpoint in endpoints.items()
        }
    folders = EVERYWHERE if arguments.data_folders is None else arguments.data_folders
    experience = {"data_folders": [_whole(folder) for folder in folders]} if folders else {}
    return {WorkerKind.EXPERIENCE: experience, WorkerKind.CONTROLLER: options}


def _whole(folder: str) -> str:
    """A folder as an absolute path, or a prefix of URLs."""
    if "://" in folder:
        return folder
    if not Path(folder).is_dir():
        raise InvalidError(f"--data-folder {folder}: is no folder; allowed: folders, and URLs")
    return str(Path(folder).resolve())


def _limits(arguments: Namespace) -> LimitSettings | None:
    return load(LimitsFile, arguments.limits).limits if arguments.limits else None


def _tracing(arguments: Namespace) -> TracingSettings | None:
    if not arguments.otlp:
        return None
    fields = {"endpoint": arguments.otlp, "sample": arguments.otlp_sample}
    return validate(TracingSettings, fields)


def _resumed(client: Client, spec: JobSpec) -> str:
    """The id of an unfinished job with the same spec, which is resumed; empty if there is none."""
    for status in (listed.status for listed in all_jobs(client, LIVE)):
        if status.name != spec.name or status.state is JobState.CANCELLING:
            continue
        try:
            job = client.get(status.job_id)
            stored = _as_submitted(parse_job(job.spec), spec)
        except PacelineError:  # it is gone, or cannot be read any more
            continue
        if stored == spec:
            say(f"resuming {status.job_id} at step {status.step}", error=True)
            resume(client, job)
            return status.job_id
        say(f"{status.job_id} is {status.state} here: {difference(stored, spec)}", error=True)
    return ""


def difference(stored: JobSpec, spec: JobSpec) -> str:
    """Why a job is not resumed but another one is started."""
    before, now = (flattened(job.model_dump(mode="json")) for job in (stored, spec))
    fields = [name for name in before | now if before.get(name) != now.get(name)]
    more = f" and {len(fields) - _SHOWN} more fields" if len(fields) > _SHOWN else ""
    return f"another {', '.join(fields[:_SHOWN])}{more} makes this a new job"


def _as_submitted(stored: JobSpec, spec: JobSpec) -> JobSpec:
    """A job without the pins that the gateway has added to its model, unless `spec` has some."""
    pins = {name: "" for name in ("revision", "digest") if not getattr(spec.model, name)}
    return stored.model_copy(update={"model": stored.model.model_copy(update=pins)})
