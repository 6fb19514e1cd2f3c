"""Webhooks hear of the end of a job, and no other host hears anything."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from paceline.config import JobSpec, parse_job
from paceline.config.lifecycle.stopping import NotifySpec
from paceline.config.lifecycle.webhooks import WebhookSettings
from paceline.enums import JobState
from paceline.errors import InvalidError, NotFoundError, PermissionDeniedError
from paceline_experience.jobs.job_parts import JobParts
from paceline_experience.jobs.registration import JobRequest
from paceline_experience.store.store import Store
from paceline_experience.webhooks.notice import notice_of
from paceline_experience.webhooks.outbox import Webhooks
from paceline_experience.webhooks.sender import (
    WebhookSender,
    check_url,
    signature,
)

if TYPE_CHECKING:
    from paceline_harness.ledgers.site import Site, Sites

KEY = "{registry}:notices"


class Receiver:
    """A real HTTP server that records what it gets."""

    def __init__(self) -> None:
        self.requests: list[tuple[dict[str, str], bytes]] = []
        self.answers = [200]
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                outer.requests.append(({k.lower(): v for k, v in self.headers.items()}, body))
                status = outer.answers.pop(0) if len(outer.answers) > 1 else outer.answers[0]
                self.send_response(status)
                self.send_header("location", "http://127.0.0.1:1/")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.origin = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    thread = threading.Thread(target=made.server.serve_forever)
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


def sender_of(settings: WebhookSettings) -> WebhookSender:
    return WebhookSender(origins=settings.origins, timeout_s=settings.timeout_s)


class Setup:
    def __init__(self, site: Site, settings: WebhookSettings, spec: JobSpec) -> None:
        self.site, self.settings, self.now = site, settings, 1_000_000.0
        self.spec = spec
        self.webhooks = Webhooks(
            store=site.store,
            settings=settings,
            sender=sender_of(settings),
            clock=lambda: self.now,
        )

    async def waits(self) -> bool:
        return bool(await self.site.store.command("EXISTS", KEY))


@pytest.fixture
async def setup(store: Store, tmp_path: Path, sites: Sites, receiver: Receiver) -> Setup:
    site = sites(store, tmp_path)
    folder = tmp_path / "secrets" / "default"
    folder.mkdir(parents=True)
    (folder / "ci").write_text("hush\n")
    settings = WebhookSettings(
        origins=(receiver.origin,), secrets=folder.parent, give_up_s=100, max_backoff_s=10
    )
    await site.submit(notify={"webhook": f"{receiver.origin}/hook?x=1", "secret": "ci"})
    spec = parse_job(json.loads((await site.jobs.get(site.job_id)).spec))
    return Setup(site, settings, spec)


async def ended(setup: Setup) -> None:
    await setup.site.job_service.set_state(setup.site.job_id, JobState.FAILED, reason="boom")


async def test_the_end_of_a_job_is_told_once_and_signed(setup: Setup, receiver: Receiver) -> None:
    await setup.webhooks.sweep()
    assert receiver.requests == []  # it still runs
    await ended(setup)
    for _ in range(3):
        await setup.webhooks.sweep()
    ((headers, body),) = receiver.requests
    told = json.loads(body)
    job_id = setup.site.job_id
    assert (told["type"], told["id"]) == ("job.ended", f"{job_id}.ended")
    assert (told["job_id"], told["state"], told["reason"]) == (job_id, "failed", "boom")
    assert headers["webhook-id"] == told["id"]
    signed = f"{told['id']}.{headers['webhook-timestamp']}.".encode() + body
    digest = base64.b64encode(hmac.new(b"hush", signed, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{digest}"
    assert not await setup.waits()


async def test_it_is_told_again_until_it_is_heard(setup: Setup, receiver: Receiver) -> None:
    receiver.answers = [500, 302, 204]
    await ended(setup)
    for _ in range(200):
        await setup.webhooks.sweep()
        setup.now += 1
    assert len(receiver.requests) == 3  # the redirect was not followed
    assert len({headers["webhook-id"] for headers, _ in receiver.requests}) == 1
    assert not await setup.waits()


async def test_nobody_tries_for_ever(setup: Setup, receiver: Receiver) -> None:
    receiver.answers = [500]
    await ended(setup)
    while await setup.waits():
        await setup.webhooks.sweep()
        setup.now += 1
    assert 90 <= setup.now - 1_000_000 <= 110
    assert len(receiver.requests) >= 10


async def test_a_host_that_is_not_allowed_any_more_hears_nothing(
    setup: Setup, receiver: Receiver
) -> None:
    await ended(setup)
    setup.settings = setup.settings.model_copy(update={"origins": ()})
    webhooks = Webhooks(
        store=setup.site.store, settings=setup.settings, sender=sender_of(setup.settings)
    )
    await webhooks.sweep()
    assert receiver.requests == []
    assert not await setup.waits()


async def test_a_deleted_job_is_told_of_all_the_same(setup: Setup, receiver: Receiver) -> None:
    receiver.answers = [500, 200]
    site = setup.site
    await ended(setup)
    await setup.webhooks.sweep()
    await deleted(site)
    with pytest.raises(NotFoundError):
        await site.jobs.get(site.job_id)
    setup.now += 60
    await setup.webhooks.sweep()
    assert [json.loads(body)["state"] for _, body in receiver.requests] == ["failed", "failed"]
    assert not await setup.waits()


async def test_a_job_that_was_deleted_by_force_is_told_of(setup: Setup, receiver: Receiver) -> None:
    """Also if a crash came after its end."""
    site = setup.site
    await site.deletion.delete(site.job_id, force=True)
    await site.jobs.note(site.job_id, state=JobState.CANCELLED)
    await deleted(site)
    await setup.webhooks.sweep()
    assert [json.loads(body)["state"] for _, body in receiver.requests] == ["cancelled"]


async def test_what_a_crash_has_kept_from_being_noted_is_noted_later(setup: Setup) -> None:
    await setup.site.jobs.note(setup.site.job_id, state=JobState.FAILED)
    assert await setup.site.jobs.live() == []
    assert await setup.waits()


async def deleted(site: Site) -> None:
    for _ in range(3):
        site.clock.advance(10)
        await site.deletion.sweep()
        with suppress(NotFoundError):
            await site.deletion.delete(site.job_id, force=False)


async def test_a_job_that_takes_long_to_prepare_is_told_of(
    setup: Setup, receiver: Receiver
) -> None:
    """A fork is copied first."""

    async def prepare(job_id: str) -> dict[str, str]:
        del job_id
        await setup.webhooks.sweep()
        return {}

    spec, jobs = make_spec(setup), setup.site.jobs
    request = JobRequest(spec.name, spec.tenant, "r", None)
    prepared = await jobs.registration.prepare(request, prepare)
    job = await jobs.create(JobParts(spec), artifacts={}, request_id="r", prepared=prepared)
    await jobs.transition(job.status.job_id, JobState.FAILED)
    await setup.webhooks.sweep()
    assert len(receiver.requests) == 1


async def test_a_request_that_comes_again_tells_nobody_again(
    setup: Setup, receiver: Receiver
) -> None:
    jobs, spec = setup.site.jobs, make_spec(setup)
    job = await jobs.create(JobParts(spec), artifacts={}, request_id="r")
    await jobs.transition(job.status.job_id, JobState.FAILED)
    await setup.webhooks.sweep()
    await jobs.create(JobParts(spec), artifacts={}, request_id="r")
    await jobs.live()
    await setup.webhooks.sweep()
    assert len(receiver.requests) == 1


def make_spec(setup: Setup, **changes: Any) -> JobSpec:
    notify = NotifySpec(webhook=f"{setup.settings.origins[0]}/hook", secret="ci")
    return setup.spec.model_copy(update={"notify": notify, **changes})


async def test_whatever_one_notice_raises_others_are_sent(setup: Setup, receiver: Receiver) -> None:
    """URLs that were accepted by another version, and entries that it has written."""
    first = setup.site.job_id
    for url in (f"{receiver.origin}/\x7f", f"http://{'a' * 70}..example.com/"):
        notify = NotifySpec.model_construct(webhook=url, secret="")
        status = (await setup.site.jobs.get(first)).status
        text = notice_of(replace(status, job_id=f"a-{len(url)}"), notify).to_json()
        await setup.site.store.command("HSET", KEY, f"a-{len(url)}", text)
    await setup.site.store.command("HSET", KEY, "b", '{"first": 0.0}')
    await ended(setup)
    await setup.webhooks.sweep()
    await setup.webhooks.sweep()
    assert [json.loads(body)["job_id"] for _, body in receiver.requests] == [first]


async def test_one_failure_of_any_kind_is_an_attempt(setup: Setup) -> None:
    def resolve(host: str, port: int) -> list[str]:
        raise UnicodeError(host, port)

    sender = WebhookSender(origins=setup.settings.origins, timeout_s=5, resolve=resolve)
    webhooks = Webhooks(
        store=setup.site.store, settings=setup.settings, sender=sender, clock=lambda: setup.now
    )
    await ended(setup)
    while await setup.waits():
        await webhooks.sweep()
        setup.now += 1
    assert 90 <= setup.now - 1_000_000 <= 110


async def test_a_tenant_whose_receivers_hang_keeps_no_other_waiting(
    setup: Setup, receiver: Receiver
) -> None:
    async def hang(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)
        writer.close()

    hanging = await asyncio.start_server(hang, "127.0.0.1", 0)
    origin = "http://127.0.0.1:" + str(hanging.sockets[0].getsockname()[1])
    settings = setup.settings.model_copy(update={"origins": (origin, receiver.origin)})
    webhooks = Webhooks(store=setup.site.store, settings=settings, sender=sender_of(settings))
    notify = NotifySpec(webhook=f"{origin}/")
    for _ in range(100):
        job = await setup.site.jobs.create(
            JobParts(make_spec(setup, tenant="slow", notify=notify)), artifacts={}
        )
        await setup.site.jobs.transition(job.status.job_id, JobState.FAILED)
    await webhooks.sweep()
    await ended(setup)
    await webhooks.sweep()
    assert len(receiver.requests) == 1
    await webhooks.close()
    hanging.close()


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/",
        "http://hooks.example.com/",
        "https://hooks.example.com:8443/",
        "https://hooks.example.com.evil.org/",
        "https://example.org#@hooks.example.com/",
        "https://evilsub.org/",
        "https://sub.org/",
    ],
)
def test_other_origins_are_refused(url: str) -> None:
    with pytest.raises(PermissionDeniedError, match="is not allowed by this installation"):
        check_url(url, ("https://hooks.example.com", "https://*.sub.org"))


@pytest.mark.parametrize(
    "url",
    [
        "https://a:b@hooks.example.com/",
        "ftp://x/",
        "https://",
        "http://x:y/",
        "https://hooks.example.com/\x7f",
        "https://hooks.example.com/\ta",
        f"https://{'a' * 64}.sub.org/",
        "https://..sub.org/",
        "https://-a.sub.org/",
        "https://\u00fc.sub.org/",
    ],
)
def test_what_is_no_plain_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidError):
        check_url(url, ("https://hooks.example.com", "https://*.sub.org"))


def test_allowed_origins() -> None:
    allowed = ("https://hooks.example.com", "https://*.sub.org", "http://ci:8080")
    assert check_url("https://HOOKS.example.com:443/x", allowed) == (
        "https",
        "hooks.example.com",
        443,
    )
    assert check_url("https://a.b.sub.org/", allowed)[1] == "a.b.sub.org"
    assert check_url("http://ci:8080/", allowed)[2] == 8080
    assert check_url("http://[::1]:8080/", ("http://[::1]:8080",))[1] == "::1"


async def test_a_name_that_points_inside_is_refused(receiver: Receiver) -> None:
    port = receiver.server.server_port
    sender = WebhookSender(
        origins=(f"http://*.example.com:{port}",),
        timeout_s=5,
        resolve=lambda host, port: ["127.0.0.1"],
    )
    told: dict[str, Any] = {"notice_id": "a", "timestamp": 1, "secret": None}
    with pytest.raises(PermissionDeniedError, match=r"127\.0\.0\.1"):
        await sender.send(f"http://a.example.com:{port}/", b"{}", **told)
    assert receiver.requests == []


def test_a_signature_of_the_standard() -> None:
    """Of the example of Standard Webhooks, with the secret decoded."""
    secret = base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    body = b'{"test": 2432232314}'
    name = "msg_p5jXN8AQM9LWM0D4loKWxJek"
    found = signature(secret, notice_id=name, timestamp=1614265330, body=body)
    assert found == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


async def test_a_missing_secret_is_found_before_the_job_starts(setup: Setup) -> None:
    notify = NotifySpec(webhook=f"{setup.settings.origins[0]}/", secret="none")
    spec = make_spec(setup, notify=notify)
    with pytest.raises(InvalidError, match="tenant 'default' has no secret 'none'"):
        setup.webhooks.check(spec)


def test_a_default_installation_calls_nobody() -> None:
    for url in (
        "https://example.com/",
        "http://127.0.0.1:8080/",
        "https://hooks.example.com:443/x",
    ):
        with pytest.raises(PermissionDeniedError, match="allowed are: none"):
            check_url(url, WebhookSettings().origins)
