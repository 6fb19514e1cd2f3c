"""`paceline try`: runs a few episodes of a job and shows them, as a job that trains nothing."""

from __future__ import annotations

import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rich.text import Text

from paceline.config import JobSpec, parse_job
from paceline.config.evaluation import EvalSpec
from paceline.config.lifecycle.stopping import StopSpec
from paceline.config.precision import with_dtype
from paceline.config.sections.model import ModelPlace, ModelSettings, ModelSpec
from paceline.enums import JobState, Purpose, ScoreStatus, TokenSource
from paceline.errors import InvalidError, StateError
from paceline.front.cli.check import allowed_targets, check_all, check_endpoints, read_job
from paceline.front.cli.entry import Exit
from paceline.front.cli.export import models_of
from paceline.front.cli.local import running
from paceline.front.cli.terminal.console import SafeConsole
from paceline.front.cli.terminal.failures import failure_lines, failures, unfinished
from paceline.front.cli.terminal.pager import pager
from paceline.front.cli.terminal.printing import say
from paceline.front.client.client import Client
from paceline.models.resolve import ModelResolver
from paceline.platform.text import visible
from paceline.tokens.chat import Tokenizer
from paceline.tokens.turn_end import turn_end_warning
from paceline.types import Trajectory

_POLL_S = 0.5
_FILES = (
    *("config.json", "generation_config.json", "chat_template.jinja"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
)
_MAX_BYTES = 256 << 20
_STYLES = {TokenSource.POLICY: "bold green", TokenSource.EXPERT: "bold cyan"}


def try_job(arguments: Namespace) -> int:
    """`paceline try JOB.yaml`."""
    wanted: int = arguments.episodes
    job = read_job(arguments.job_file, arguments.overrides, arguments.data)
    spec = trial_of(with_dtype(job, "auto"), wanted)
    if spec.model.endpoint is not None:
        raise InvalidError(
            "model.endpoint: try it with `paceline eval NAME -f JOB.yaml --tasks 4` instead"
        )
    check_endpoints(spec, arguments.endpoints)
    check_all(spec, allowed_targets(arguments))
    console = SafeConsole()
    with tempfile.TemporaryDirectory(prefix="paceline-try-") as name:
        run_dir = arguments.run_dir or Path(name)
        with (
            running(run_dir, arguments) as local,
            Client(local.url, token=local.token) as client,
        ):
            job = client.submit(spec)
            job_id, model = job.status.job_id, parse_job(job.spec).model
            say(f"waiting for {wanted} episodes; logs are in {run_dir / 'logs'}", error=True)
            try:
                episodes, is_late = _episodes(client, job_id, timeout_s=arguments.timeout)
                why = list(_why(client, run_dir, job_id, is_late=is_late))
            finally:
                with suppress(StateError):  # it is over
                    client.cancel(job_id, reason="tried")
        tokenizer = tokenizer_for(model, models_of(arguments), run_dir)
        with pager(console):
            for number, episode in enumerate(episodes, 1):
                console.print(shown(episode, tokenizer, number), soft_wrap=True)
            for line in filter(None, (*why, turn_end_warning(tokenizer))):
                console.print(Text(visible(line), "red"), soft_wrap=True)
    good = [episode for episode in episodes if episode.score.status is ScoreStatus.OK]
    mean = sum(episode.score.reward for episode in good) / len(good) if good else 0.0
    late = f" within {arguments.timeout:g} s" if is_late else ""
    reward = f"; mean reward {mean:.3f}" if good else ""
    console.print(f"{len(episodes)} of {wanted} episodes ended{late}{reward}")
    return Exit.OK if len(episodes) == wanted else Exit.JOB


def trial_of(spec: JobSpec, episodes: int) -> JobSpec:
    """A job of kind `eval` with so many of the job's training tasks."""
    first = EvalSpec(
        tasks=episodes,
        temperature=spec.sampling.temperature,
        seed=spec.tasks.seed,
        timeout_s=spec.tasks.episode_timeout_s,
    )
    checkpoint = spec.trainer.checkpoint.model_copy(update={"best": None})
    trainer = spec.trainer.model_copy(update={"checkpoint": checkpoint})
    only = {
        "name": "try",
        "kind": "eval",
        "eval": first,
        "evals": {},
        "stop": StopSpec(),
        "trainer": trainer,
        "tracking": (),
    }
    return spec.model_copy(update=only)


def shown(episode: Trajectory, tokenizer: Tokenizer, number: int) -> Text:
    """An episode as text: who said what, the reward with its parts, and the time."""
    text = Text(f"\nepisode {number}: task {episode.task_id[:8]}\n", "bold")
    for transcript in episode.transcripts:
        for span in transcript.spans:
            said = tokenizer.decode(transcript.tokens[span.start : span.end])
            text.append(f"  {span.source.value:<12}", "dim")
            text.append(f"{said!r}\n", _STYLES.get(span.source, ""))
    score, timing = episode.score, episode.timing
    parts = ", ".join(f"{name} {value:g}" for name, value in score.parts.items())
    detail = f"; {score.detail}" if score.detail else ""
    if variant := episode.provenance.prompt_variant:
        replaced = any(one.original_prompt for one in episode.transcripts)
        note = ", shown with the task's own prompt" if replaced else ""
        text.append(f"  variant {variant}{note}\n", "dim")
    text.append(f"  reward {score.reward:g}", "bold")
    text.append(f" ({parts}{detail})\n")
    text.append(
        f"  {timing.total_s:.2f} s: {timing.generate_s:.2f} generating, "
        f"{timing.environment_s:.2f} in the environment, {timing.reward_s:.2f} scoring\n",
        "dim",
    )
    return text


def _episodes(client: Client, job_id: str, *, timeout_s: float) -> tuple[list[Trajectory], bool]:
    """The episodes that end, and whether the time was over before."""
    deadline = time.monotonic() + timeout_s
    while not (is_late := time.monotonic() >= deadline):
        job = client.get(job_id).status
        if job.state.terminal:
            if job.state is not JobState.SUCCEEDED:
                say(f"the job {job.state}: {job.reason}", error=True)
            break
        time.sleep(_POLL_S)
    page = client.list_trajectories(job_id, page_size=200, purpose=Purpose.EVAL)
    return [*reversed(page.trajectories)], is_late


def _why(client: Client, run_dir: Path, job_id: str, *, is_late: bool) -> Iterator[str]:
    """Why episodes failed, and what a late job waited for."""
    yield from failure_lines(failures(run_dir, job_id))
    if is_late:
        jobs = client.get_activity().jobs
        waits_s = next((job.waits_s for job in jobs if job.status.job_id == job_id), {})
        yield from unfinished(run_dir, job_id, client.get(job_id).status, waits_s)


def tokenizer_for(model: ModelSpec, settings: ModelSettings | None, run_dir: Path) -> Tokenizer:
    """The tokenizer and chat template of a job's model: a folder, or of the hub or a store.

    Raises:
        ConfigError: there is no such model.
        UnavailableError: the hub or the store cannot be reached.
    """
    if model.place is not ModelPlace.FOLDER:
        resolver = ModelResolver(settings or ModelSettings(), run_dir=run_dir)
        return Tokenizer.from_files(resolver.find(model, _FILES, max_bytes=_MAX_BYTES).files)
    return tokenizer_of(Path(model.path))


def tokenizer_of(folder: Path) -> Tokenizer:
    """The tokenizer and chat template of a model on this machine."""
    names = [path for path in folder.iterdir() if path.suffix in (".json", ".jinja")]
    return Tokenizer.from_files({path.name: path.read_bytes() for path in names})
