"""Factories of a job's worlds, and the operator's settings for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paceline.config import JobSpec
from paceline.config.load import validate
from paceline.config.named import own_transform
from paceline.errors import ConfigError, InvalidError
from paceline.plugins import Environment, registry
from paceline.plugins.loading import attribute
from paceline_environment.worlds.transforms import RemoteTransform
from paceline_environment.worlds.worlds import JobWorlds

Settings = Mapping[str, Mapping[str, Any]]  # of an operator, by the name of an environment


def worlds_of(
    job_id: str, spec: JobSpec, worlds: JobWorlds, settings: Settings
) -> Callable[..., Environment]:
    """The factory of a job's worlds, wherever they live.

    Raises:
        InvalidError: the environment is not installed here.
    """
    name, load_s = spec.tasks.environment, spec.tasks.load_timeout_s
    tenant = spec.tenant
    if spec.code is not None and spec.has_own_environment:
        code = spec.code.digest
        return worlds.of(job_id, code=code, target=name, tenant=tenant, load_s=load_s)
    plugin = registry.environment(name)
    if plugin.worlds_in == "worker":
        make = plugin.load_world()
    else:
        target = registry.target("environments", name)
        sealed = plugin.worlds_in == "sealed"
        make = worlds.installed(job_id, target=target, sealed=sealed, tenant=tenant, load_s=load_s)
    if not plugin.settings:
        return make

    def with_settings(**options: Any) -> Environment:
        return make(**options, settings=settings.get(name, {}))

    return with_settings


def own_transform_of(job_id: str, spec: JobSpec, worlds: JobWorlds) -> RemoteTransform | None:
    """The transform of a job that is in the code that comes with it; None: it has none there."""
    plugin = own_transform(spec)
    if spec.code is None or plugin is None:
        return None
    return worlds.transform(
        job_id,
        code=spec.code.digest,
        target=plugin.kind,
        options=plugin.options,
        tenant=spec.tenant,
        load_s=spec.tasks.load_timeout_s,
    )


def check_settings(settings: Settings) -> None:
    """Check what an operator has set for environments.

    Raises:
        ConfigError: an environment is not installed, or has no such setting.
    """
    for name, values in settings.items():
        try:
            model = registry.environment(name).settings
        except InvalidError as error:
            raise ConfigError(f"options.worlds.{name}: {error.message}") from None
        if not model:
            raise ConfigError(f"options.worlds.{name}: this environment has no settings")
        try:
            validate(attribute(model), values)
        except ConfigError as error:
            raise ConfigError(f"options.worlds.{name}: {error.message}") from None
