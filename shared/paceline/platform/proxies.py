"""Proxies of the environment: which calls go through one.

Calls between services, and calls to this machine, never do. Calls to the outside go through the
proxy of `http_proxy`, `https_proxy` or `all_proxy`, unless `no_proxy` names their host.
"""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypedDict
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from paceline.errors import ConfigError

DIRECT = ("grpc.enable_http_proxy", 0)
"""Option of a gRPC channel that no proxy carries."""
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class HttpxOptions(TypedDict):
    """Arguments of an httpx client, which would read proxies by rules of its own."""

    proxy: str | None
    trust_env: bool
    verify: ssl.SSLContext


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine, as its text says; nothing is resolved."""
    host = host.strip("[]").rstrip(".").lower()
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def environment_proxy(url: str) -> str | None:
    """URL of the proxy through which a call to the outside goes; None: it goes there directly."""
    parts = urlsplit(url)
    if is_loopback(parts.hostname or "") or proxy_bypass(_address(url)):
        return None
    proxies = getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    return proxy if not proxy or "://" in proxy else f"http://{proxy}"


def httpx_options(url: str, *, authorities: Path | None = None) -> HttpxOptions:
    """Arguments of an httpx client that calls `url`; `authorities`: those of its certificate.

    Raises:
        ConfigError: the proxy of the environment is no URL, or needs a package that is missing.
    """
    import httpx  # some tens of milliseconds

    trusted = ssl.create_default_context(cafile=str(authorities)) if authorities else True
    verify = httpx.create_ssl_context(trusted)
    proxy = environment_proxy(url)
    if proxy is not None:
        try:
            httpx.HTTPTransport(proxy=proxy, verify=verify).close()
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"the proxy of the environment (http_proxy, https_proxy, all_proxy) for {url} "
                f"cannot be used: {error}; give it as http://HOST:PORT, or name "
                f"{urlsplit(url).hostname} in no_proxy"
            ) from None
    return {"proxy": proxy, "trust_env": False, "verify": verify}


def direct_mounts(urls: Iterable[str]) -> dict[str, None]:
    """`mounts` of an httpx client for which those of `urls` that are on this machine are direct.

    All other calls follow the environment.
    """
    hosts = {urlsplit(url).hostname or "" for url in urls}
    return {
        f"all://[{host}]" if ":" in host else f"all://{host}": None
        for host in hosts
        if is_loopback(host)
    }


def without_loopback(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables with which programs of others leave proxies out for this machine."""
    names = ("no_proxy", "NO_PROXY")
    listed = [part.strip() for name in names for part in environment.get(name, "").split(",")]
    if "*" in listed:  # which counts only alone
        return dict.fromkeys(names, "*")
    return dict.fromkeys(names, ",".join(dict.fromkeys(filter(None, (*listed, *_LOOPBACK)))))


def proxy_note(url: str) -> str:
    """Part of a message about a failed call of `url`: the proxy that it went to, if any."""
    proxy = environment_proxy(url)
    if proxy is None:
        return ""
    name = urlsplit(url).hostname
    return f" through the proxy {_address(proxy)} of the environment; no_proxy={name} leaves it out"


def _address(url: str) -> str:
    """`host:port` as written, without credentials."""
    return urlsplit(url).netloc.rpartition("@")[2]
