"""The plug-ins that a job names, and the check of their options and requirements."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.config.base import PluginSpec
from paceline.config.job import JobSpec, RewardSpec
from paceline.config.needs import refusal
from paceline.config.objective import ObjectiveSpec
from paceline.config.options import marked, options_source, wrong_options
from paceline.errors import InvalidError
from paceline.plugins import RegularExpression, declared, registry
from paceline.plugins.allowed import NO_TARGETS, AllowedTargets

GENERATION = frozenset({"samplers", "allocators"})
IN_LEDGER = frozenset({"filters", "advantages", "replays"}) | GENERATION
OWN_KINDS = IN_LEDGER | {"environments", "rewards", "transforms"}
"""Kinds that may be in the code that comes with a job."""
FUNCTION = "function"  # the option of the reward `python`
_PYTHON = "python"


@dataclass(frozen=True, slots=True)
class NamedPlugin:
    """One plug-in of a job, with the field that names it and the field that holds its options."""

    kind: str
    name: str
    field: str
    options_field: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    is_own: bool = False  # it is in the code that comes with the job
    function: str = ""  # that its options name, and that is not in the code of the job

    @property
    def target(self) -> tuple[str, str] | None:
        """The function of an installed module that is named, after its field."""
        if self.function:
            return f"{self.options_field}.{FUNCTION}", self.function
        return None if self.is_own or ":" not in self.name else (self.field, self.name)


def named(spec: JobSpec) -> Iterator[NamedPlugin]:
    """Every plug-in of a job; its environment once per purpose, unless it is the job's own.

    Slots of the objective never are its own: no code of jobs enters a trainer.
    """
    has_code = spec.code is not None
    for plugin in _named_in(spec):
        if has_code and ":" in plugin.name and plugin.kind not in registry.SLOTS:
            yield dataclasses.replace(plugin, is_own=True)
        elif plugin.function and has_code:
            yield dataclasses.replace(plugin, function="")
        else:
            yield plugin


def named_function(part: RewardSpec) -> tuple[str, str] | None:
    """The `module:attribute` that a reward part calls and the field that names it, if it does."""
    if ":" in part.kind:
        return "kind", part.kind
    target = part.options.get(FUNCTION) if part.kind == _PYTHON else None
    return (f"options.{FUNCTION}", target) if isinstance(target, str) else None


def module_targets(spec: JobSpec) -> dict[str, str]:
    """Functions of installed modules that a job names, by field."""
    return dict(plugin.target for plugin in named(spec) if plugin.target is not None)


def check_targets(plugins: Iterable[NamedPlugin], allowed: AllowedTargets) -> None:
    """Check the functions of installed modules that plug-ins of a job name.

    Raises:
        UnlistedError: one is not `allowed`.
    """
    for each in plugins:
        if each.kind in registry.FROM_MODULES and each.target is not None:
            field, target = each.target
            _check(each.kind, field, target, allowed)


def own_ledger_parts(spec: JobSpec) -> list[NamedPlugin]:
    """Parts in the job's own code that its ledger calls."""
    return [plugin for plugin in named(spec) if plugin.is_own and plugin.kind in IN_LEDGER]


def has_own_generation(spec: JobSpec) -> bool:
    """Whether the sampler or the allocator of a job is in the code that comes with it."""
    return any(plugin.kind in GENERATION for plugin in own_ledger_parts(spec))


def own_transform(spec: JobSpec) -> PluginSpec | None:
    """The transform of a job, if it is in the code that comes with it."""
    transform = spec.tasks.transform
    return (
        transform
        if spec.code is not None and transform is not None and ":" in transform.kind
        else None
    )


def own_called_by_workers(spec: JobSpec) -> list[NamedPlugin]:
    """The rewards and the transform of a job that are in the code that comes with it.

    A function that the options of `python` name is a reward, with the other options.
    """
    if spec.code is None:
        return []
    called = (plugin for plugin in _named_in(spec) if plugin.kind in {"rewards", "transforms"})
    return [_function_of(plugin) for plugin in called if plugin.function or ":" in plugin.name]


def _function_of(reward: NamedPlugin) -> NamedPlugin:
    if not reward.function:
        return dataclasses.replace(reward, is_own=True)
    options = {name: value for name, value in reward.options.items() if name != FUNCTION}
    return NamedPlugin(
        reward.kind,
        reward.function,
        f"{reward.options_field}.{FUNCTION}",
        reward.options_field,
        options,
        is_own=True,
    )


def _named_in(spec: JobSpec) -> Iterator[NamedPlugin]:
    tasks, experience = spec.tasks, spec.experience
    purposes = [("tasks.options", tasks.options)]
    for name, evaluation in spec.eval_sets.items():
        field = f"evals.{name}.options" if name else "eval.options"
        purposes.append((field, {**tasks.options, **evaluation.options}))
    for path, options in [] if spec.has_own_environment else purposes:
        yield NamedPlugin("environments", tasks.environment, "tasks.environment", path, options)
    if tasks.source is not None:
        yield from _sources(spec, tasks.source)
    if tasks.transform is not None:
        yield _named("transforms", "tasks.transform", tasks.transform)
    yield _named("topologies", "sampling.topology", spec.sampling.topology)
    for index, part in enumerate(spec.reward):
        function = named_function(part) if part.kind == _PYTHON else None
        reward = _named("rewards", f"reward.{index}", part)
        yield dataclasses.replace(reward, function=function[1]) if function else reward
    yield _named("samplers", "experience.sampler", experience.sampler)
    if experience.allocator is not None:
        yield _named("allocators", "experience.allocator", experience.allocator)
    if experience.replay is not None:
        yield _named("replays", "experience.replay", experience.replay)
    for index, plugin in enumerate(experience.filters):
        yield _named("filters", f"experience.filters.{index}", plugin)
    yield _named("advantages", "experience.advantage", experience.advantage)
    for index, plugin in enumerate(experience.advantage_shaping):
        yield _named("advantages", f"experience.advantage_shaping.{index}", plugin)
    yield _named("engines", "rollout.engine", spec.rollout.engine)
    yield from _slots(spec.trainer.objective)
    for index, plugin in enumerate(spec.trainer.hooks):
        yield _named("hooks", f"trainer.hooks.{index}", plugin)
    for index, tracker in enumerate(spec.tracking):
        yield _named("trackers", f"tracking.{index}", tracker)


def _sources(spec: JobSpec, source: PluginSpec) -> Iterator[NamedPlugin]:
    """The environment whose tasks are played in the world of another, once per purpose."""
    purposes = [("tasks.source", source.options)]
    for name, evaluation in spec.eval_sets.items():
        field = f"evals.{name}.source" if name else "eval.source"
        purposes.append((field, {**source.options, **evaluation.source}))
    for path, options in purposes:
        yield NamedPlugin("environments", source.kind, "tasks.source.kind", path, options)


def _slots(objective: ObjectiveSpec) -> Iterator[NamedPlugin]:
    field = "trainer.objective"
    yield _named("proximals", f"{field}.proximal", objective.proximal)
    yield _named("surrogates", f"{field}.surrogate", objective.surrogate)
    yield _named("aggregations", f"{field}.aggregation", objective.aggregation)
    for kind, name in (("shapings", "shaping"), ("corrections", "corrections")):
        for index, slot in enumerate(getattr(objective, name)):
            yield _named(kind, f"{field}.{name}.{index}", slot)
    for index, regulariser in enumerate(objective.regularisers):
        yield _named("regularisers", f"{field}.regularisers.{index}", regulariser)


def problems(
    spec: JobSpec,
    kinds: Collection[str] = registry.KINDS,
    *,
    in_process: bool = False,
    allowed: AllowedTargets = NO_TARGETS,
) -> Iterator[str]:
    """A line for each plug-in that may not be named, refused option and unmet requirement.

    `allowed`: functions of installed modules that the operator has listed.
    `in_process`: the plug-ins (of an environment: its tasks) run in this process, so they are
    imported if nothing else describes their options.
    """
    reported: set[str] = set()
    for plugin in named(spec):
        # An environment appears once per purpose; report it once.
        if plugin.kind not in kinds or plugin.field in reported:
            continue
        lines = [*_problems(plugin, allowed, in_process=in_process)]
        for line in lines or _unmet(spec, plugin, allowed, in_process=in_process):
            reported.add(plugin.field)
            yield line


def patterns(spec: JobSpec) -> dict[str, str]:
    """All plug-in options that are regular expressions, by field."""
    return {
        f"{plugin.options_field}.{option}": text
        for plugin in named(spec)
        if not plugin.is_own
        for option in marked(plugin.kind, plugin.name, RegularExpression)
        if isinstance(text := plugin.options.get(option), str)
    }


def _problems(plugin: NamedPlugin, allowed: AllowedTargets, *, in_process: bool) -> Iterator[str]:
    if plugin.is_own:
        if plugin.kind not in OWN_KINDS:
            yield (
                f"{plugin.field}: {plugin.name!r}: of the code that comes with a job only its "
                "environment, transform, rewards, sampler, allocator, replay, filters and "
                "advantages may be named"
            )
        return  # the code is read in processes of the job alone
    try:
        _check(plugin.kind, plugin.field, plugin.name, allowed)
        if plugin.target is not None:
            _check(plugin.kind, *plugin.target, allowed)
    except InvalidError as error:
        yield error.message
        return
    yield from wrong_options(
        plugin.options_field,
        plugin.kind,
        plugin.name,
        plugin.options,
        import_plugin=in_process,
        allowed=allowed,
    )


def _check(kind: str, field: str, name: str, allowed: AllowedTargets) -> None:
    """`registry.check` with the field in the message."""
    try:
        registry.check(kind, name, allowed=allowed)
    except InvalidError as error:
        raise type(error)(f"{field}: {error.message.removeprefix(f'{kind}: ')}") from None


def _unmet(
    spec: JobSpec, plugin: NamedPlugin, allowed: AllowedTargets, *, in_process: bool
) -> Iterator[str]:
    """A line for each requirement of a plug-in that the job does not meet."""
    if plugin.is_own:
        return
    source = options_source(plugin.kind, plugin.name, import_plugin=in_process, allowed=allowed)
    declaration = declared(source)
    title = f"{plugin.kind.removesuffix('s')} {plugin.name!r}"
    for need in declaration.needs_with(plugin.options):
        if line := refusal(need, spec, field=plugin.options_field, plugin=title):
            yield line


def _named(kind: str, field: str, plugin: PluginSpec) -> NamedPlugin:
    return NamedPlugin(kind, plugin.kind, f"{field}.kind", field, plugin.options)
