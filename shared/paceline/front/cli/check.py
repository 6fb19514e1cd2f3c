"""Reads job files; the commands that need no server: `validate`, `plugins`, `recipes`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from paceline.config import JobSpec, load_job
from paceline.config.documents import read_yaml
from paceline.config.load import load
from paceline.config.load import validate as validate_settings
from paceline.config.named import module_targets, problems
from paceline.config.plugins import PluginSettings
from paceline.config.precision import with_dtype
from paceline.config.recipes import recipe
from paceline.config.sections.model import ModelPlace, ModelSpec, is_folder
from paceline.config.service import EndpointsFile
from paceline.config.uploads import DataSpec
from paceline.errors import ConfigError, InvalidError
from paceline.front.cli.needs.memory import lines, needs
from paceline.front.cli.terminal.printing import say
from paceline.front.local.checks import findings
from paceline.front.local.devices.report import plan_here
from paceline.plugins import registry as registry
from paceline.plugins.allowed import AllowedTargets
from paceline.plugins.slot_options import is_here

_JUDGE = "judge"  # the reward, and the server that it asks by default


def validate(arguments: Namespace) -> int:
    """`paceline validate JOB.yaml`."""
    spec = read_job(arguments.job_file, arguments.overrides)
    check_all(spec, allowed_targets(arguments))
    if arguments.resolved:
        say(resolved(spec))
        return 0
    say(f"{arguments.job_file}: ok")
    planned = plan_here(with_dtype(spec, "auto"))
    for line in lines(needs(spec)) if planned is None else planned.lines():
        say(line)
    return 0


def resolved(spec: JobSpec) -> str:
    """The job with all its values as YAML, independent of recipes and defaults."""
    values = spec.model_dump(mode="json", exclude={"recipe"})
    head = f"# recipe: {', '.join(spec.recipe)}\n" if spec.recipe else ""
    return head + yaml.safe_dump(values, sort_keys=False, width=100).rstrip()


def plugins(_: Namespace) -> int:
    """`paceline plugins`."""
    for kind in registry.KINDS:
        for name, plugin in sorted(registry.installed(kind).items()):
            say(f"{kind:<14} {name:<16} {plugin.target}")
    for target, reason in registry.unreadable().items():
        say(f"cannot be read: {target}: {reason}", error=True)
    return 0


def recipes(_: Namespace) -> int:
    """`paceline recipes`."""
    names = sorted(registry.installed("recipes"))
    width = max(map(len, names), default=0)
    for entry in map(recipe, names):
        stage, evidence = entry.method.stage, entry.method.evidence
        say(f"{entry.name:<{width}}  {stage:<8}  {evidence:<13}  {entry.title}")
    return 0


def show_recipe(arguments: Namespace) -> int:
    """`paceline recipes show NAME`."""
    try:
        shown = recipe(arguments.name)
    except InvalidError as error:
        raise InvalidError(f"recipe: {error.message}") from None
    about = "".join(f"# {line}".rstrip() + "\n" for line in shown.about.splitlines())
    claim = f"#\n# Claim: {shown.method.claim}.\n" if shown.method.claim else ""
    say(f"{about}{claim}{shown.text.rstrip()}")
    return 0


def read_job(path: Path, overrides: list[str], data: Path | None = None) -> JobSpec:
    """Read a job file; folders of a model, code and data on this machine become absolute.

    Code and data lie relative to the job file, a model relative to the current folder or else to
    the job file; `data` replaces that of the job.
    """
    spec = load_job(path, dict(override(text) for text in overrides))
    if data is not None:
        spec = spec.model_copy(update={"data": DataSpec(path=str(data.resolve()))})
    elif spec.data is not None and spec.data.path:
        place = str(_place(path.parent, spec.data.path))
        spec = spec.model_copy(update={"data": spec.data.model_copy(update={"path": place})})
    if spec.code is not None and spec.code.path:
        place = str(_place(path.parent, spec.code.path))
        spec = spec.model_copy(update={"code": spec.code.model_copy(update={"path": place})})
    if spec.model.endpoint is not None:
        return spec
    for near in (Path(), path.parent):
        if is_folder(folder := _place(near, spec.model.path)):
            model = spec.model.model_copy(update={"path": str(folder)})
            return spec.model_copy(update={"model": model})
    return spec


def _place(near: Path, path: str) -> Path:
    """The absolute path of one that is relative to a folder, or begins with `~`."""
    try:
        return (near / Path(path).expanduser()).resolve()
    except (OSError, RuntimeError, ValueError):  # no such user, NUL, ...
        return near / path


def allowed_targets(arguments: Namespace) -> AllowedTargets:
    """The functions that `--allow` lists; raises `ConfigError`."""
    return plugin_settings(arguments).targets


def plugin_settings(arguments: Namespace) -> PluginSettings:
    """The settings that `--allow` makes; raises `ConfigError`."""
    try:
        return validate_settings(PluginSettings, {"allowed": arguments.allow})
    except ConfigError as error:
        raise ConfigError(f"--allow: write MODULE:ATTRIBUTE; {error.message}") from None


def check(spec: JobSpec, allowed: AllowedTargets) -> None:
    """Raise `ConfigError` listing every problem that this machine can detect."""
    wrong = [
        *problems(spec, allowed=allowed),
        *_module_problems(spec, allowed),
        *_model_problems(spec.model),
    ]
    if wrong:
        raise ConfigError("; ".join(wrong))


def check_all(spec: JobSpec, allowed: AllowedTargets) -> None:
    """`check`, plus the checks of services at submit, for code, data and model files here.

    Checks that cannot run here are named, and left to the services.
    """
    check(spec, allowed)
    problems = findings(spec, allowed)
    for line in problems.unchecked:
        say(f"not checked here: {line}", error=True)
    if problems.wrong:
        raise ConfigError(problems.message)


def check_endpoints(spec: JobSpec, file: Path | None, *, also: Iterable[str] = ()) -> None:
    """Raise `ConfigError` for a server that is asked, and is not in the `endpoints` of a file.

    `also`: names of further ones.
    """
    known = sorted({*also, *(load(EndpointsFile, file).endpoints if file is not None else ())})
    for field, name in _asked(spec):
        if name not in known:
            where = f"{file}; there: {', '.join(known)}" if file else "a file for --endpoints"
            raise ConfigError(f"{field}: {name!r} is not one of `endpoints` in {where}")


def _asked(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """The servers that a job asks, after their fields."""
    if spec.model.endpoint is not None:
        yield "model.endpoint.name", spec.model.endpoint.name
    for index, part in enumerate(spec.reward):
        if part.kind == _JUDGE:
            yield f"reward.{index}.endpoint", part.options.get("endpoint", _JUDGE)


def override(text: str, *, option: str = "--set") -> tuple[str, Any]:
    """Field and value of `FIELD=VALUE`, as given to an option."""
    field, equals, value = text.partition("=")
    if not equals or not field:
        raise InvalidError(f"{option} {text}: write FIELD=VALUE")
    try:
        return field, read_yaml(value, what=f"{option} {field}")
    except InvalidError:
        return field, value


def _module_problems(spec: JobSpec, allowed: AllowedTargets) -> Iterator[str]:
    """Modules of functions that `--allow` lists and that cannot be imported here."""
    for field, target in module_targets(spec).items():
        module = target.partition(":")[0]
        if target in allowed and not is_here(module):
            yield (
                f"{field}: {target!r}: there is no module {module!r} here; install it, or name "
                "its folder in PYTHONPATH"
            )


def _model_problems(spec: ModelSpec) -> Iterator[str]:
    """Problems of a folder; models of the hub and of stores are checked by the gateway."""
    folder = Path(spec.path)
    if spec.place is not ModelPlace.FOLDER:
        return
    if not is_folder(folder):
        is_relative = not spec.path.startswith(("/", "~"))
        where = f" in {Path.cwd()}, nor beside the job file" if is_relative else ""
        yield f"model.path: {spec.path} is not a folder{where}"
        return
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            yield f"model.path: {folder} has no {name}"
