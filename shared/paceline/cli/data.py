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

from paceline.cli.check import allowed_targets, check, read_job
from paceline.cli.entry import Exit
from paceline.cli.terminal.console import SafeConsole
from paceline.cli.terminal.tables import Column, FittingTable
from paceline.cli.trial import tokenizer_for
from paceline.config import JobSpec
from paceline.data import JobData, takes_data
from paceline.data.job_data import EVERYWHERE
from paceline.digest import Permutation
from paceline.environments.dataset.tasks import DatasetTasks
from paceline.environments.dataset.world import observation_of
from paceline.errors import InvalidError
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
        found = prompts_of(spec, cache)
        console.print(sizes(found))
        for each in found:
            if isinstance(each.source, DatasetTasks) and len(each.source.counts()) > 1:
                console.print(mixture(each.label, each.source))
        training = found[0]
        for position in range(min(arguments.rows, len(training.source))):
            task = training.source[position]
            text = rendered(observed(spec, task, training.options), tokenizer)
            console.print(shown(task, text, len(tokenizer.encode(text))), soft_wrap=True)
        most = spec.sampling.max_context - spec.sampling.max_tokens
        rows = [(e.label, lengths(spec, e, tokenizer, arguments.sample)) for e in found]
        console.print(length_table(rows, max_context=spec.sampling.max_context, most=most))
        warnings = [w for each in found for w in answer_warnings(spec, each, arguments.sample)]
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
    made = [Prompts("training", _source(name, options, data, tasks.seed), tasks.options)]
    for label, each in spec.eval_sets.items():
        changed = {**options, **(each.options if source is None else each.source)}
        where = f"evals.{label}" if label else "eval"
        own = replace(data, options_field=f"{where}.{kind}")
        found = _source(name, changed, own, each.seed)
        made.append(Prompts(where, found, {**tasks.options, **each.options}))
    return made


def _source(name: str, options: Mapping[str, Any], data: JobData, seed: int) -> TaskSource:
    make = registry.environment(name).load_tasks()
    given = {takes: data} if (takes := takes_data(make)) else {}
    return make(seed=seed, **given, **options)


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


def lengths(spec: JobSpec, each: Prompts, tokenizer: Tokenizer, sample: int) -> list[int]:
    """Tokens of the prompts of up to `sample` tasks, spread over all of them."""
    positions = sampled(each, sample)
    texts = (rendered(observed(spec, each.source[at], each.options), tokenizer) for at in positions)
    return sorted(len(tokenizer.encode(text)) for text in texts)


def sampled(each: Prompts, sample: int) -> list[int]:
    """Positions of up to `sample` tasks, spread over all of them."""
    size = len(each.source)
    places = Permutation(size, "lengths")
    return [places(at) for at in range(min(sample, size))]


def answer_warnings(spec: JobSpec, each: Prompts, sample: int) -> list[str]:
    """What is wrong with the answers that rewards compare text with, of up to `sample` tasks."""
    if not isinstance(each.source, DatasetTasks):
        return []
    payloads = [json.loads(each.source[at].payload) for at in sampled(each, sample)]
    warnings = list[str]()
    for part in spec.reward:
        if part.kind in _COMPARE_TEXT and not part.options.get("numeric"):
            field = str(part.options.get("answer_field", "answer"))
            answers = [payload.get(field) for payload in payloads]
            warnings += [
                f"{each.label}: {field!r} of {told}" for told in _doubts(answers, part.kind)
            ]
    return warnings


def _doubts(answers: Sequence[Any], kind: str) -> Iterator[str]:
    of_all = f"of {len(answers)} tasks is"
    if missing := sum(answer is None for answer in answers):
        yield f"{missing} {of_all} missing, so that the reward {kind!r} cannot judge their replies"
    whole = [each for each in answers if isinstance(each, float) and each.is_integer()]
    if whole:
        yield (
            f"{len(whole)} {of_all} a decimal such as {whole[0]}, but the reward {kind!r} compares "
            f"text, to which {whole[0]:.0f} is another. A column of integers with missing values "
            "is saved so; store integers, or compare numbers (`exact` with numeric: true, or "
            "`numeric`)"
        )


def sizes(found: Sequence[Prompts]) -> FittingTable:
    """How many tasks each purpose has."""
    table = FittingTable("tasks", "in an epoch", "distinct rows")
    for each in found:
        distinct = len(each.source)
        if isinstance(each.source, DatasetTasks):
            distinct = sum(size for size, _ in each.source.counts())
        table.add_row(each.label, f"{len(each.source):,}", f"{distinct:,}")
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
    found = Text(f"\ntask {task.task_id[:8]}  {task.domain}  {num_tokens} tokens\n", "bold")
    cut = f"... ({len(text)} characters)" if len(text) > _MOST_CHARS else ""
    found.append(text[:_MOST_CHARS])
    found.append(cut, "dim")
    found.append(f"\npayload {task.payload[:_MOST_CHARS]}", "dim")
    return found


def length_table(rows: Sequence[tuple[str, list[int]]], *, max_context: int, most: int) -> Group:
    """Percentiles of tokens, and how many prompts are too long."""
    table = FittingTable(
        *("tokens of prompts", Column("counted", 2), Column("min", 3), "median"),
        *(Column("90 %", 1), Column("99 %", 4), "max", f"over {most}", f"over {max_context}"),
    )
    for label, tokens in rows:
        cells = [str(tokens[min(len(tokens) - 1, len(tokens) * p // 100)]) for p in _PERCENTILES]
        over = [sum(each > limit for each in tokens) for limit in (most, max_context)]
        told = [Text(f"{n} ({n / len(tokens):.1%})", "red" if n else "") for n in over]
        table.add_row(label, str(len(tokens)), *cells, *told)
    caption = (
        f"{max_context}: max_context, no episode starts; {most}: less max_tokens, so that the "
        "reply may be cut off"
    )
    return Group(table, Text(caption, "italic dim"))
