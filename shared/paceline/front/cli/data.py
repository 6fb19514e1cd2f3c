"""`paceline data inspect`: tasks of a job as they will be prompted, and how long they are."""

from __future__ import annotations

import asyncio
import json
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from paceline.config import JobSpec
from paceline.data import JobData, takes_data
from paceline.data.job_data import EVERYWHERE
from paceline.environments.dataset.tasks import DatasetTasks
from paceline.environments.dataset.world import observation_of
from paceline.errors import InvalidError
from paceline.front.cli.check import allowed_targets, check, read_job
from paceline.front.cli.entry import Exit
from paceline.front.cli.terminal.console import SafeConsole
from paceline.front.cli.terminal.tables import Column, FittingTable
from paceline.front.cli.trial import tokenizer_for
from paceline.platform.digest import Permutation
from paceline.plugins import Observation, TaskSource, registry
from paceline.tokens.chat import Tokenizer
from paceline.tokens.dialogue import Dialogue
from paceline.tokens.turn_end import turn_end_warning
from paceline.types import Task

_MOST_CHARS = 4000  # of a prompt that is shown
_COMPARE_TEXT = ("exact", "environment")
_PERCENTILES = (0, 50, 90, 99, 100)


@dataclass(frozen=True, slots=True)
class Prompts:
    """The tasks of one purpose, and what makes them prompts."""

    label: str
    source: TaskSource
    options: Mapping[str, Any]  # of the world


def inspect(arguments: Namespace) -> int:
    """`paceline data inspect JOB.yaml`."""
    spec = read_job(arguments.job_file, arguments.overrides, arguments.data)
    check(spec, allowed_targets(arguments))
    console = SafeConsole()
    with tempfile.TemporaryDirectory(prefix="paceline-data-") as cache:
        tokenizer = tokenizer_for(spec.model, None, Path(cache))
        prompts = prompts_of(spec, cache)
        console.print(sizes(prompts))
        for part in prompts:
            if isinstance(part.source, DatasetTasks) and len(part.source.counts()) > 1:
                console.print(mixture(part.label, part.source))
        training = prompts[0]
        for position in range(min(arguments.rows, len(training.source))):
            task = training.source[position]
            text = rendered(observed(spec, task, training.options), tokenizer)
            console.print(shown(task, text, len(tokenizer.encode(text))), soft_wrap=True)
        most = spec.sampling.max_context - spec.sampling.max_tokens
        rows = [(e.label, lengths(spec, e, tokenizer, arguments.sample)) for e in prompts]
        console.print(length_table(rows, max_context=spec.sampling.max_context, most=most))
        warnings = [w for part in prompts for w in answer_warnings(spec, part, arguments.sample)]
        for warning in filter(None, (turn_end_warning(tokenizer), *warnings)):
            console.print(Text(warning, "red"), soft_wrap=True)
    return Exit.OK


def prompts_of(spec: JobSpec, cache: str) -> list[Prompts]:
    """The tasks of training and of each evaluation, read on this machine."""
    if spec.lists_own_tasks:
        raise InvalidError(
            "tasks.environment: its tasks are listed by code of the job, which runs in services "
            "only; `paceline try` shows some"
        )
    data = JobData(
        uploaded=spec.data.path if spec.data is not None else "", allowed=EVERYWHERE, cache=cache
    )
    tasks, source = spec.tasks, spec.tasks.source
    name = tasks.environment if source is None else source.kind
    options = tasks.options if source is None else source.options
    kind = "options" if source is None else "source"
    data = replace(data, options_field=f"tasks.{kind}")
    all_prompts = [Prompts("training", _source(name, options, data, tasks.seed), tasks.options)]
    for label, evaluation in spec.eval_sets.items():
        changed = {**options, **(evaluation.options if source is None else evaluation.source)}
        where = f"evals.{label}" if label else "eval"
        own = replace(data, options_field=f"{where}.{kind}")
        eval_source = _source(name, changed, own, evaluation.seed)
        all_prompts.append(Prompts(where, eval_source, {**tasks.options, **evaluation.options}))
    return all_prompts


def _source(name: str, options: Mapping[str, Any], data: JobData, seed: int) -> TaskSource:
    make = registry.environment(name).load_tasks()
    arguments = {takes: data} if (takes := takes_data(make)) else {}
    return make(seed=seed, **arguments, **options)


def observed(spec: JobSpec, task: Task, options: Mapping[str, Any]) -> Observation:
    """The first observation of a task, in its world if that runs here."""
    if spec.has_own_environment:
        return observation_of(json.loads(task.payload))
    plugin = registry.environment(spec.tasks.environment)
    if plugin.worlds_in != "worker" or plugin.settings:
        raise InvalidError(
            f"tasks.environment: worlds of {spec.tasks.environment!r} live in processes of their "
            "own; `paceline try` shows their prompts"
        )
    return asyncio.run(_reset(plugin.load_world()(**options), task))


async def _reset(world: Any, task: Task) -> Observation:
    try:
        return await world.reset(task, 0)
    finally:
        await world.close()


def rendered(seen: Observation, tokenizer: Tokenizer) -> str:
    """The text whose tokens the policy is shown.

    Raises:
        InvalidError: the model's template leaves out tools, or calls of some.
    """
    if seen.tools or any(message.tool_calls for message in seen.messages):
        Dialogue(tokenizer).show(seen)
    if tokenizer.chat and seen.messages:
        return tokenizer.render(seen.messages, tools=seen.tools)
    return seen.text


def lengths(spec: JobSpec, prompts: Prompts, tokenizer: Tokenizer, sample: int) -> list[int]:
    """Tokens of the prompts of up to `sample` tasks, spread over all of them."""
    positions = sampled(prompts, sample)
    texts = (
        rendered(observed(spec, prompts.source[at], prompts.options), tokenizer) for at in positions
    )
    return sorted(len(tokenizer.encode(text)) for text in texts)


def sampled(prompts: Prompts, sample: int) -> list[int]:
    """Positions of up to `sample` tasks, spread over all of them."""
    size = len(prompts.source)
    places = Permutation(size, "lengths")
    return [places(at) for at in range(min(sample, size))]


def answer_warnings(spec: JobSpec, prompts: Prompts, sample: int) -> list[str]:
    """Warnings about answers that rewards compare as text, for up to `sample` tasks."""
    if not isinstance(prompts.source, DatasetTasks):
        return []
    payloads = [json.loads(prompts.source[at].payload) for at in sampled(prompts, sample)]
    warnings = list[str]()
    for part in spec.reward:
        if part.kind in _COMPARE_TEXT and not part.options.get("numeric"):
            field = str(part.options.get("answer_field", "answer"))
            answers = [payload.get(field) for payload in payloads]
            warnings += [
                f"{prompts.label}: {field!r} of {doubt}" for doubt in _doubts(answers, part.kind)
            ]
    return warnings


def _doubts(answers: Sequence[Any], kind: str) -> Iterator[str]:
    of_all = f"of {len(answers)} tasks is"
    if missing := sum(answer is None for answer in answers):
        yield f"{missing} {of_all} missing, so that the reward {kind!r} cannot judge their replies"
    whole = [answer for answer in answers if isinstance(answer, float) and answer.is_integer()]
    if whole:
        yield (
            f"{len(whole)} {of_all} a decimal such as {whole[0]}, but the reward {kind!r} compares "
            f"text, to which {whole[0]:.0f} is another. A column of integers with missing values "
            "is saved so; store integers, or compare numbers (`exact` with numeric: true, or "
            "`numeric`)"
        )


def sizes(all_prompts: Sequence[Prompts]) -> FittingTable:
    """How many tasks each purpose has."""
    table = FittingTable("tasks", "in an epoch", "distinct rows")
    for prompts in all_prompts:
        distinct = len(prompts.source)
        if isinstance(prompts.source, DatasetTasks):
            distinct = sum(size for size, _ in prompts.source.counts())
        table.add_row(prompts.label, f"{len(prompts.source):,}", f"{distinct:,}")
    return table


def mixture(label: str, source: DatasetTasks) -> FittingTable:
    """The share of each source."""
    table = FittingTable(
        Column(f"sources of {label}", is_long=True), "tasks of it", "in an epoch", "share"
    )
    counts = source.counts()
    total = sum(size for _, size in counts)
    for name, (distinct, size) in zip(source.names, counts, strict=True):
        table.add_row(name, f"{distinct:,}", f"{size:,}", f"{size / total:.1%}")
    return table


def shown(task: Task, text: str, num_tokens: int) -> Text:
    """A prompt, and the task that it is from."""
    output = Text(f"\ntask {task.task_id[:8]}  {task.domain}  {num_tokens} tokens\n", "bold")
    cut = f"... ({len(text)} characters)" if len(text) > _MOST_CHARS else ""
    output.append(text[:_MOST_CHARS])
    output.append(cut, "dim")
    output.append(f"\npayload {task.payload[:_MOST_CHARS]}", "dim")
    return output


def length_table(rows: Sequence[tuple[str, list[int]]], *, max_context: int, most: int) -> Group:
    """Percentiles of tokens, and how many prompts are too long."""
    table = FittingTable(
        *("tokens of prompts", Column("counted", 2), Column("min", 3), "median"),
        *(Column("90 %", 1), Column("99 %", 4), "max", f"over {most}", f"over {max_context}"),
    )
    for label, tokens in rows:
        cells = [str(tokens[min(len(tokens) - 1, len(tokens) * p // 100)]) for p in _PERCENTILES]
        over = [sum(count > limit for count in tokens) for limit in (most, max_context)]
        counts = [Text(f"{n} ({n / len(tokens):.1%})", "red" if n else "") for n in over]
        table.add_row(label, str(len(tokens)), *cells, *counts)
    caption = (
        f"{max_context}: max_context, no episode starts; {most}: less max_tokens, so that the "
        "reply may be cut off"
    )
    return Group(table, Text(caption, "italic dim"))
