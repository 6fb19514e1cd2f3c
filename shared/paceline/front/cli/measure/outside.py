"""`--endpoint` of `paceline eval` and `paceline generate`: who answers instead of workers."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import TypeAdapter, ValidationError

from paceline.config.load import load, validate
from paceline.config.sections.endpoints import EndpointSettings
from paceline.config.service import EndpointsFile
from paceline.errors import ConfigError, InvalidError
from paceline.plugins.endpoints import EndpointName

_NAME = TypeAdapter[str](EndpointName)
_OTHERWISE = "endpoint"  # of a server whose host is no name

Servers = dict[str, EndpointSettings]


def name_of(arguments: Namespace) -> str:
    """The name of the endpoint that answers: as it is given, or the host of its URL."""
    endpoint: str = arguments.endpoint
    name = urlsplit(endpoint).hostname or _OTHERWISE if _is_url(endpoint) else endpoint
    try:
        return _NAME.validate_python(name)
    except ValidationError:
        if _is_url(endpoint):
            return _OTHERWISE
        raise InvalidError(
            f"--endpoint: {endpoint!r} is neither a URL, such as http://127.0.0.1:8000/v1, nor the "
            "name of one of `endpoints`"
        ) from None


def check_here(arguments: Namespace) -> None:
    """Raise `InvalidError` for an address that a running installation would have to take."""
    if arguments.key_env or _is_url(arguments.endpoint):
        raise InvalidError(
            "--endpoint: a running installation is given the name of one of its `endpoints`; its "
            "operator has their addresses and keys"
        )


def servers_of(arguments: Namespace) -> Servers:
    """The outside servers for services that are started here.

    Raises:
        ConfigError: the address is none, its name is taken, or the key is not there.
    """
    file: Path | None = arguments.endpoints
    servers = dict(load(EndpointsFile, file).endpoints) if file is not None else {}
    if not _is_url(arguments.endpoint):
        if arguments.key_env:
            raise ConfigError("--key-env: is of an --endpoint with a URL")
        return servers
    name = name_of(arguments)
    if name in servers:
        raise ConfigError(f"--endpoint: {file} has an endpoint {name!r} too; give its name instead")
    if arguments.key_env and not os.environ.get(arguments.key_env):
        raise ConfigError(f"--key-env: {arguments.key_env} is not set")
    fields = {
        "base_url": arguments.endpoint,
        "key_env": arguments.key_env,
        "concurrency": 1024,  # the job has a limit of its own
    }
    try:
        return servers | {name: validate(EndpointSettings, fields)}
    except ConfigError as error:
        raise ConfigError(f"--endpoint: {error.message}") from None


def _is_url(text: str) -> bool:
    return "://" in text
