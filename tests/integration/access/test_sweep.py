"""Calls every route and method with all permitted and forbidden credentials.

What there is comes from the application and the protocol themselves: what is new is tried too.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest
from grpc import aio

from paceline.platform.transport.operations import for_users
from paceline.platform.transport.principal import Role
from paceline.v1 import jobs_pb2
from paceline_gateway.access.rules import Routes, required_role, rest_roles
from paceline_harness.patience import PATIENCE_S

if TYPE_CHECKING:
    from conftest import Site
else:
    Site = Any

NOBODYS = f"pl_{'0' * 12}_{'0' * 64}"
HEIGHT = {"read": 0, "submit": 1, "admin": 2}
# What nobody may learn from a refusal.
SECRETS = ("confidential", "submit-a", "admin-a", "Traceback", "paceline_", "redis", ".py")
# The methods of the installation that no tenant may call, whatever their role.
WHOLE = {"SetQuota"}
REST = rest_roles()


@pytest.fixture
def limits() -> dict[str, Any]:
    """As many attempts as these tests make: they ask who is refused, not how often."""
    return {"access": {"failed_burst": 1_000_000, "all_failed_burst": 1_000_000}}


def routes_of(app: Any) -> Iterator[tuple[str, str]]:
    """Every method and path of the application."""
    for path, methods in app.openapi()["paths"].items():
        for method in methods:
            yield method.upper(), path
    for route in app.routes:
        path = getattr(route, "path", None)
        if path:
            for method in route.methods:
                yield method, path


def guarded(app: Any) -> list[tuple[str, str]]:
    return [
        (method, path)
        for method, path in routes_of(app)
        if not path.startswith(("/docs", "/redoc", "/openapi.json", "/livez", "/readyz"))
    ]


def filled(path: str, site: Site) -> str:
    values = {
        "job_id": site.ids["job"],
        "token_id": site.ids["read-a"],
        "name": "tokenizer.json",
    }
    return re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], "x"), path)


def body_of(path: str) -> dict[str, Any]:
    if path.endswith("/replay"):
        return {"json": {"lines": "{}"}}
    return {"json": {"name": "x", "tenant": "a"}} if path == "/v1/tokens" else {"json": {}}


async def ask(http: httpx.AsyncClient, method: str, url: str, path: str, token: str | None) -> Any:
    headers: dict[bytes, bytes] = (
        {} if token is None else {b"authorization": f"Bearer {token}".rstrip().encode("latin-1")}
    )
    more = body_of(path) if method in {"POST", "PUT", "PATCH"} else {}
    async with http.stream(method, url, headers=headers, **more) as response:
        if response.headers.get("content-type", "").startswith("text/event-stream"):
            return response.status_code, ""  # open until the job ends
        return response.status_code, (await response.aread()).decode()


def strangers(site: Site) -> dict[str, str | None]:
    wrong = site.tokens["admin-a"][:-1] + ("0" if site.tokens["admin-a"][-1] != "0" else "1")
    return {
        "nothing": None,
        "empty": "",
        "garbage": "garbage \u00e9",
        "nobody's": NOBODYS,
        "nearly right": wrong,
        "expired": site.tokens["expired"],
        "revoked": site.tokens["revoked"],
    }


def leaks(text: str, site: Site, *given: str) -> list[str]:
    hidden = [*SECRETS, site.ids["job"], *site.tokens.values(), *site.ids.values()]
    shown = "".join(given)
    return [word for word in hidden if word in text and word not in shown]


async def test_no_route_lets_strangers_in(peopled: Site) -> None:
    async with httpx.AsyncClient(base_url=peopled.url, timeout=PATIENCE_S) as http:
        tried = guarded(peopled.app)
        assert len(tried) >= 14
        for method, path in tried:
            url = filled(path, peopled)
            for name, token in strangers(peopled).items():
                status, text = await ask(http, method, url, path, token)
                assert status == 401, (method, path, name, text)
                assert json.loads(text)["error"]["type"] == "AuthenticationError"
                assert not leaks(text, peopled, url), (method, path, name, text)


async def test_no_route_lets_too_small_a_role_in(peopled: Site) -> None:
    async with httpx.AsyncClient(base_url=peopled.url, timeout=PATIENCE_S) as http:
        for method, path in guarded(peopled.app):
            least = REST[f"{method} {path}"]
            assert least is not None
            url = filled(path, peopled)
            for role in (role for role in HEIGHT if HEIGHT[role] < HEIGHT[least]):
                token = peopled.tokens[f"{role}-a"]
                status, text = await ask(http, method, url, path, token)
                assert status == 403, (method, path, role, text)
                assert not leaks(text, peopled, url), (method, path, role, text)


async def test_what_is_of_another_tenant_does_not_exist(peopled: Site) -> None:
    token = peopled.tokens["admin-b"]
    async with httpx.AsyncClient(base_url=peopled.url, timeout=PATIENCE_S) as http:
        for query in ("", "?tenant=a", "?tenant=nobody"):
            for path in ("/v1/jobs", "/v1/tokens", "/v1/audit-log"):
                status, text = await ask(http, "GET", f"{path}{query}", path, token)
                assert status == 200
                assert not leaks(text, peopled, *theirs(peopled)), (path, query, text)
        for method, path in guarded(peopled.app):
            if "{job_id}" not in path and "{token_id}" not in path:
                continue
            url = filled(path, peopled)
            nowhere = re.sub(r"\{\w+\}", "confidential-000000", path)
            said = [await ask(http, method, each, path, token) for each in (url, nowhere)]
            told = [(s, re.sub(r"'[^']*'", "'ID'", text)) for s, text in said]
            assert told[0] == told[1], (method, path)
            assert told[0][0] == 404, (method, path)


def theirs(site: Site) -> list[str]:
    """The resources visible to tenant b."""
    return [site.ids[f"{role}-b"] for role in HEIGHT] + [f"{role}-b" for role in HEIGHT]


async def test_permitted_roles_are_admitted_everywhere(peopled: Site) -> None:
    async with httpx.AsyncClient(base_url=peopled.url, timeout=PATIENCE_S) as http:
        for method, path in sorted(guarded(peopled.app), key=lambda each: each[0] == "DELETE"):
            least = REST[f"{method} {path}"]
            token = peopled.tokens["all"] if least == "admin" else peopled.tokens[f"{least}-a"]
            status, text = await ask(http, method, filled(path, peopled), path, token)
            assert status not in {401, 403, 404, 405, 500, 501}, (method, path, text)


async def test_what_is_open_is_open(peopled: Site) -> None:
    async with httpx.AsyncClient(base_url=peopled.url, timeout=PATIENCE_S) as http:
        await peopled.ready()
        for path in ("/livez", "/docs", "/openapi.json"):
            assert (await http.get(path)).status_code == 200
        # Nothing else is there, whoever asks.
        for path in ("/v1/nothing", "/", "/v1/jobs/x/y/z", "//v1/jobs", "/v1/jobs/"):
            assert (await http.get(f"{peopled.url}{path}")).status_code == 404, path
        assert (await http.put("/v1/jobs", json={})).status_code == 405


def methods_of() -> list[tuple[str, Any]]:
    return [(each.action, each) for each in for_users()]


def message_of(method: Any, site: Site) -> Any:
    made = method.request()
    names = (("job_id", site.ids["job"]), ("token_id", site.ids["read-a"]))
    of_model = (("name", "tokenizer.json"),) if method.name == "GetModelFile" else ()
    for name, value in (*names, *of_model):
        if name in method.request.DESCRIPTOR.fields_by_name:
            setattr(made, name, value)
    return made


async def attempt(
    name: str, method: Any, site: Site, token: str | None
) -> tuple[grpc.StatusCode, str]:
    """The status of a call, and what was said.

    Not by grpc.aio: it tells an "internal error from Core" of a stream that was refused before its
    message was on its way.
    """
    data = message_of(method, site).SerializeToString()
    metadata = () if token is None else (("authorization", f"Bearer {token}"),)

    def told() -> tuple[grpc.StatusCode, str]:
        with grpc.insecure_channel(site.grpc) as channel:
            make = channel.unary_stream if method.streams_replies else channel.unary_unary
            stub: Any = make(f"/{name}", response_deserializer=method.reply.FromString)
            try:
                call = stub(data, timeout=PATIENCE_S, metadata=metadata)
                if method.streams_replies:
                    next(call)
                    call.cancel()
            except grpc.RpcError as refused:
                error: Any = refused
                return error.code(), error.details() or ""
        return grpc.StatusCode.OK, ""

    return await asyncio.to_thread(told)


@pytest.fixture
async def channel(peopled: Site) -> AsyncIterator[aio.Channel]:
    async with aio.insecure_channel(peopled.grpc) as made:
        yield made


async def test_no_method_lets_strangers_in(peopled: Site) -> None:
    tried = methods_of()
    assert len(tried) >= 13
    for name, method in tried:
        for who, token in strangers(peopled).items():
            if token is not None and not token.isascii():
                continue  # gRPC itself does not send it
            code, text = await attempt(name, method, peopled, token)
            assert code is grpc.StatusCode.UNAUTHENTICATED, (name, who, text)
            assert not leaks(text, peopled), (name, who, text)


async def test_no_method_lets_too_small_a_role_in(peopled: Site) -> None:
    for name, method in methods_of():
        for role in (role for role in HEIGHT if HEIGHT[role] < HEIGHT[required_role(name)]):
            token = peopled.tokens[f"{role}-a"]
            code, text = await attempt(name, method, peopled, token)
            assert code is grpc.StatusCode.PERMISSION_DENIED, (name, role, text)
            assert not leaks(text, peopled), (name, role, text)


async def test_no_method_reveals_another_tenant(peopled: Site) -> None:
    token = peopled.tokens["admin-b"]
    for name, method in methods_of():
        fields = method.request.DESCRIPTOR.fields_by_name
        if "job_id" in fields or "token_id" in fields:
            code, text = await attempt(name, method, peopled, token)
            assert code is grpc.StatusCode.NOT_FOUND, (name, text)
            assert not leaks(text, peopled, peopled.ids["job"], peopled.ids["read-a"])


async def test_methods_admit_permitted_roles(peopled: Site) -> None:
    refused = {
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.INTERNAL,
    }
    # What revokes a token comes last: the others still need it.
    for name, method in sorted(methods_of(), key=lambda each: each[1].name == "RevokeToken"):
        whole = method.name in WHOLE or required_role(name) == "admin"
        token = peopled.tokens["all"] if whole else peopled.tokens[f"{required_role(name)}-a"]
        code, text = await attempt(name, method, peopled, token)
        assert code not in refused, (name, text)


async def test_what_is_for_services_is_not_served(peopled: Site, channel: aio.Channel) -> None:
    for method in ("Authentication/Authenticate", "Experience/Demand", "Roster/ListWorkers"):
        call: Any = channel.unary_unary(f"/paceline.v1.{method}")
        metadata = (("authorization", f"Bearer {peopled.tokens['all']}"),)
        with pytest.raises(aio.AioRpcError) as caught:
            await call(b"", timeout=PATIENCE_S, metadata=metadata)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_principal_in_the_metadata_of_a_user_counts_for_nothing(
    peopled: Site, channel: aio.Channel
) -> None:
    from paceline.platform.transport.principal import principal_metadata, service

    for token, expected in ((None, "UNAUTHENTICATED"), (peopled.tokens["read-b"], "NOT_FOUND")):
        pairs = [] if token is None else [("authorization", f"Bearer {token}")]
        call: Any = channel.unary_unary("/paceline.v1.Jobs/GetJob")
        data = jobs_pb2.GetJobRequest(job_id=peopled.ids["job"]).SerializeToString()
        with pytest.raises(aio.AioRpcError) as caught:
            await call(
                data, timeout=PATIENCE_S, metadata=(*pairs, *principal_metadata(service("x")))
            )
        assert caught.value.code().name == expected


async def test_a_route_without_a_rule_is_not_served() -> None:
    table = {name: role for name, role in REST.items() if name != "GET /v1/jobs"}
    assert Routes(table).find("GET", "/v1/jobs") is None
    assert Routes().find("GET", "/v1/jobs") == ("GET /v1/jobs", Role.READ)
