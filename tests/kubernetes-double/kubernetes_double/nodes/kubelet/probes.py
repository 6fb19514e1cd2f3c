"""Startup, readiness and liveness probes of a container."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from kubernetes_double.nodes.client import Object
from kubernetes_double.nodes.kubelet.container import Container

_SOONER_S = 0.25
_HEALTH = "/grpc.health.v1.Health/Check"
_SERVING = b"\x08\x01"


async def outcomes(
    probe: Object, *, container: Container, address: str, ports: dict[str, int]
) -> AsyncIterator[tuple[bool, str]]:
    """Yield whether a probe passes, and why, each time that changes by the probe's thresholds.

    Until the first success it is probed more often than `periodSeconds`, so that tests do not
    wait; failures are still counted per period.
    """
    period_s = float(probe.get("periodSeconds", 10))
    most_failures, enough = probe.get("failureThreshold", 3), probe.get("successThreshold", 1)
    failures, successes, passes = 0.0, 0, None
    await asyncio.sleep(probe.get("initialDelaySeconds", 0))
    while container.alive:
        reason = await ask(probe, container=container, address=address, ports=ports)
        pause_s = period_s if passes else min(period_s, _SOONER_S)
        if not reason:
            failures, successes = 0.0, successes + 1
            if successes >= enough and passes is not True:
                passes = True
                pause_s = period_s
                yield True, ""
        else:
            failures, successes = failures + pause_s / period_s, 0
            if failures >= most_failures and passes is not False:
                passes = False
                yield False, reason
        await asyncio.sleep(pause_s)


async def ask(probe: Object, *, container: Container, address: str, ports: dict[str, int]) -> str:
    """Probe once; returns what is wrong, empty if nothing is."""
    timeout_s = float(probe.get("timeoutSeconds", 1))
    try:
        async with asyncio.timeout(timeout_s):
            if "exec" in probe:
                command = probe["exec"]["command"]
                code, output = await container.execute(command, timeout_s=timeout_s)
                return "" if code == 0 else f"exit code {code}: {output[-500:]}"
            if "httpGet" in probe:
                return await get(probe["httpGet"], address=address, ports=ports)
            if "grpc" in probe:
                return await _grpc(probe["grpc"], address=address, timeout_s=timeout_s)
            port = port_of(probe["tcpSocket"]["port"], ports)
            _, writer = await asyncio.open_connection(address, port)
            writer.close()
            return ""
    except TimeoutError:
        return f"no answer within {timeout_s} s"
    except OSError as error:
        return str(error)


def port_of(port: int | str, ports: dict[str, int]) -> int:
    """A port by number or by its name in the container."""
    return ports[port] if port in ports else int(port)


async def get(action: Object, *, address: str, ports: dict[str, int]) -> str:
    """Probe by HTTP GET; returns an empty text for a status from 200 to 399."""
    secure: Any = None
    if action.get("scheme") == "HTTPS":
        secure = ssl.create_default_context()
        secure.check_hostname = False
        secure.verify_mode = ssl.CERT_NONE
    port = port_of(action["port"], ports)
    reader, writer = await asyncio.open_connection(address, port, ssl=secure)
    try:
        head = f"GET {action.get('path', '/')} HTTP/1.1\r\nHost: {address}:{port}\r\n"
        writer.write(f"{head}Connection: close\r\n\r\n".encode())
        status = (await reader.readline()).split()
        code = int(status[1]) if len(status) > 1 else 0
        return "" if 200 <= code < 400 else f"HTTP status {code}"
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _grpc(action: Object, *, address: str, timeout_s: float) -> str:
    service = (action.get("service") or "").encode()
    request = b"\x0a" + bytes([len(service)]) + service if service else b""
    async with grpc.aio.insecure_channel(f"{address}:{action['port']}") as channel:
        call = channel.unary_unary(_HEALTH)
        try:
            answer = await call(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
    return "" if answer == _SERVING else "not serving"
