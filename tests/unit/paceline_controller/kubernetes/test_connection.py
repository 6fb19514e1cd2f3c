"""Requests over real HTTP to a server that answers as a test says."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from paceline.errors import (
    ConfigError,
    ConflictError,
    FencedError,
    InvalidError,
    NotFoundError,
    PacelineError,
    PermissionDeniedError,
    UnavailableError,
)
from paceline_controller.runtimes.kubernetes.connection import (
    HistoryGoneError,
    KubernetesClient,
    configuration,
)
from paceline_controller.runtimes.kubernetes.resources import DEPLOYMENTS, JOBS, LEASES, PODS
from paceline_harness.patience import PATIENCE_S

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Api:
    """A server of one handler, and the connection to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.handler: Handler = self.nothing
        self.requests: list[web.Request] = []

    async def nothing(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({})

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request)
        await request.read()
        return await self.handler(request)

    def answers(self, *replies: tuple[int, Any]) -> None:
        """One after another; the last one for ever."""
        left = list(replies)

        async def reply(_: web.Request) -> web.StreamResponse:
            code, body = left.pop(0) if len(left) > 1 else left[0]
            return web.json_response(body, status=code)

        self.handler = reply

    async def connect(
        self, port: int, *, timeout_s: float = PATIENCE_S, **more: Any
    ) -> KubernetesClient:
        path = self.folder / "kubeconfig"
        config = {
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
            "users": [{"name": "u", "user": {"token": "secret-token"}}],
        }
        path.write_text(yaml.safe_dump(config))
        settings = await configuration(path)
        return KubernetesClient(settings, namespace="ns", timeout_s=timeout_s, **more)


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    made = Api(tmp_path)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", made.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.port = site._server.sockets[0].getsockname()[1]  # type: ignore
    yield made
    await runner.cleanup()


@pytest.fixture
async def connection(api: Any) -> AsyncIterator[KubernetesClient]:
    made = await api.connect(api.port)
    yield made
    await made.close()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (400, InvalidError),
        (401, PermissionDeniedError),
        (403, PermissionDeniedError),
        (404, NotFoundError),
        (409, ConflictError),
        (410, HistoryGoneError),
        (422, InvalidError),
        (418, PacelineError),
        (429, UnavailableError),
        (500, UnavailableError),
        (503, UnavailableError),
    ],
)
async def test_statuses_become_our_errors(
    api: Any, code: int, expected: type[PacelineError]
) -> None:
    connection = await api.connect(api.port, timeout_s=3.0)  # some are asked for so long
    api.answers((code, {"kind": "Status", "message": "because"}))
    with pytest.raises(expected, match=r"kubernetes: get deployments\.apps web: because") as found:
        await connection.get(DEPLOYMENTS, "web")
    assert type(found.value) is expected
    await connection.close()


async def test_an_invalid_object_is_explained_field_by_field(
    api: Any, connection: KubernetesClient
) -> None:
    causes = [{"field": "spec.replicas", "message": "must be at least 0", "reason": "Invalid"}]
    api.answers((422, {"message": "Deployment is invalid", "details": {"causes": causes}}))
    with pytest.raises(InvalidError, match=r"spec\.replicas: must be at least 0"):
        await connection.patch(DEPLOYMENTS, "web", {"spec": {"replicas": -1}})


@pytest.mark.parametrize(
    "text",
    [
        "failed to create typed patch object (ns/x; batch/v1, Kind=Job): .spec.template.spec"
        '.containers[name="paceline"].env: duplicate entries for key [name="A"]',
        "failed to convert new object (ns/x; batch/v1, Kind=Job) to proper version (batch/v1): no",
    ],
)
async def test_a_body_that_does_not_fit_its_schema_is_not_tried_again(
    api: Any, connection: KubernetesClient, text: str
) -> None:
    """The server answers 500 without a reason, as it does when its store is away."""
    body = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}}
    refused = {"kind": "Status", "status": "Failure", "message": text, "code": 500}
    api.answers((500, refused))
    with pytest.raises(InvalidError, match=text.partition(" (")[0]):
        await connection.apply(body)
    assert len(api.requests) == 1
    api.answers((500, {**refused, "message": "etcdserver: leader changed"}), (200, body))
    assert await connection.apply(body) == body


async def test_an_answer_that_is_no_status_is_an_error_too(
    api: Any, connection: KubernetesClient
) -> None:
    async def page(_: web.Request) -> web.StreamResponse:
        return web.Response(status=403, text="<html>proxy says no</html>")

    api.handler = page
    with pytest.raises(PermissionDeniedError, match="proxy says no"):
        await connection.get(PODS, "p")


async def test_what_is_harmless_to_repeat_is_repeated(
    api: Any, connection: KubernetesClient
) -> None:
    good = {"metadata": {"name": "x"}}
    api.answers((503, {}), (429, {}), (200, good))
    assert await connection.get(JOBS, "x") == good
    api.answers((503, {}), (200, good))
    assert await connection.patch(JOBS, "x", {}) == good
    assert len(api.requests) == 5


async def test_non_idempotent_requests_are_sent_once(
    api: Any, connection: KubernetesClient
) -> None:
    api.answers((503, {}), (200, {}))
    with pytest.raises(UnavailableError):
        await connection.create(LEASES, {"metadata": {"name": "x"}})
    api.answers((503, {}), (200, {}))
    with pytest.raises(UnavailableError):
        await connection.replace(LEASES, {"metadata": {"name": "x"}})
    assert len(api.requests) == 2


async def test_every_request_has_a_deadline(api: Any) -> None:
    async def hang(_: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        return web.json_response({})

    api.handler = hang
    connection = await api.connect(api.port, timeout_s=0.3)
    with pytest.raises(UnavailableError, match="TimeoutError"):
        await connection.get(PODS, "p")
    await connection.close()


async def test_an_error_response_outranks_a_last_attempt_that_timed_out(api: Any) -> None:
    async def hang_later(_: web.Request) -> web.StreamResponse:
        if len(api.requests) > 1:
            await asyncio.Event().wait()
        return web.json_response({"message": "because"}, status=503)

    api.handler = hang_later
    connection = await api.connect(api.port, timeout_s=3.0)
    with pytest.raises(UnavailableError, match="because"):
        await connection.get(PODS, "p")
    assert len(api.requests) > 1
    await connection.close()


async def test_nobody_listens(api: Any) -> None:
    connection = await api.connect(1, timeout_s=0.3)
    with pytest.raises(UnavailableError, match="kubernetes: "):
        await connection.get(PODS, "p")
    await connection.close()


async def test_requests_carry_path_manager_and_token(
    api: Any, connection: KubernetesClient
) -> None:
    body = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"}}
    api.answers((200, body))
    await connection.apply(body)
    (request,) = api.requests
    assert request.path == "/apis/apps/v1/namespaces/ns/deployments/web"
    assert request.query == {"fieldManager": "paceline-controller", "force": "true"}
    assert request.headers["Authorization"] == "Bearer secret-token"
    assert request.content_type == "application/apply-patch+yaml"


async def test_long_lists_come_page_by_page(api: Any, connection: KubernetesClient) -> None:
    def page(name: str, more: str) -> dict[str, Any]:
        items = [{"metadata": {"name": name}}]
        return {"items": items, "metadata": {"resourceVersion": "7", "continue": more}}

    api.answers((200, page("a", "next")), (200, page("b", "")))
    items, version = await connection.list(PODS, selector="x=y")
    assert [item["metadata"]["name"] for item in items] == ["a", "b"]
    assert [item["kind"] for item in items] == ["Pod", "Pod"]
    assert version == "7"
    assert [request.query.get("continue") for request in api.requests] == [None, "next"]


async def test_deleting_what_is_gone_is_fine(api: Any, connection: KubernetesClient) -> None:
    for code in (404, 409):
        api.answers((code, {}))
        await connection.delete(PODS, "p", uid="u")


async def events(connection: KubernetesClient) -> list[tuple[str, Any]]:
    found = connection.watch(PODS, version="5", watch_s=1)
    return [(change, body["metadata"]) async for change, body in found]


def streams(*lines: dict[str, Any], then_s: float = 0.0) -> Handler:
    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for line in lines:
            data = json.dumps(line).encode() + b"\n"
            for start in range(0, len(data), 1000):
                await response.write(data[start : start + 1000])
        await asyncio.sleep(then_s)
        return response

    return stream


async def test_a_watch_delivers_changes_of_any_length(
    api: Any, connection: KubernetesClient
) -> None:
    large = {"name": "a", "annotations": {"x": "y" * 300_000}}
    api.handler = streams(
        {"type": "ADDED", "object": {"metadata": large}},
        {"type": "DELETED", "object": {"metadata": {"name": "b"}}},
    )
    begun = ("BOOKMARK", {"resourceVersion": "5"})
    assert await events(connection) == [begun, ("ADDED", large), ("DELETED", {"name": "b"})]
    assert api.requests[0].query["resourceVersion"] == "5"


async def test_a_watch_reports_expired_history(api: Any, connection: KubernetesClient) -> None:
    status = {"kind": "Status", "code": 410, "message": "too old resource version"}
    api.handler = streams({"type": "ERROR", "object": status})
    with pytest.raises(HistoryGoneError, match="too old"):
        await events(connection)
    api.answers((410, status))
    with pytest.raises(HistoryGoneError):
        await events(connection)


async def test_a_silent_watch_ends(api: Any) -> None:
    api.handler = streams(then_s=30)
    connection = await api.connect(api.port, timeout_s=0.5)
    with pytest.raises(UnavailableError):
        await events(connection)
    await connection.close()


async def test_a_reader_without_write_access_can_still_read(api: Any) -> None:
    allowed = [True]
    connection = await api.connect(api.port, may_write=lambda: allowed[0])
    api.answers((200, {"metadata": {}}))
    await connection.patch(PODS, "p", {})
    allowed[0] = False
    await connection.get(PODS, "p")
    with pytest.raises(FencedError, match="another controller leads"):
        await connection.patch(PODS, "p", {})
    assert [request.method for request in api.requests] == ["PATCH", "GET"]
    await connection.close()


async def test_without_a_cluster_the_error_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kubernetes: "):
        await configuration(tmp_path / "missing")
