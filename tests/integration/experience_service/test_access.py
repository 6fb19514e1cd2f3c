"""Tokens, tenants and the audit log, through the calls of the gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import (
    AuthenticationError,
    InvalidError,
    NotFoundError,
    PacelineError,
    PermissionDeniedError,
)
from paceline.platform.transport.principal import (
    ALL_TENANTS,
    Principal,
    Role,
    token_digest,
    token_id_of,
)
from paceline.platform.transport.rpc import stream
from paceline.v1 import access_pb2 as pb
from paceline.v1 import jobs_pb2, options_pb2
from paceline.v1.roster_pb2 import ListWeightsRequest
from paceline_harness.patience import call

ROOT = Principal("", "bootstrap", ALL_TENANTS, Role.ADMIN, "10.0.0.1")
CHIEF = Principal("a0", "chief", "a", Role.ADMIN, "10.0.0.2")
ANN = Principal("a1", "ann", "a", Role.SUBMIT, "10.0.0.3")
BOB = Principal("b1", "bob", "b", Role.SUBMIT, "10.0.0.4")


async def create(client: Any, who: Principal = ROOT, **fields: Any) -> pb.CreateTokenReply:
    wanted: dict[str, Any] = {
        "name": "ann",
        "tenant": "a",
        "role": options_pb2.ROLE_SUBMIT,
    } | fields
    request = pb.CreateTokenRequest(**wanted)
    return await call(client.access.CreateToken, request, on_behalf_of=who)


async def revoke(client: Any, who: Principal, token_id: str) -> pb.Token:
    request = pb.RevokeTokenRequest(token_id=token_id)
    return await call(client.access.RevokeToken, request, on_behalf_of=who)


async def authenticate(client: Any, secret: str) -> pb.AuthenticateReply:
    request = pb.AuthenticateRequest(token_id=token_id_of(secret), digest=token_digest(secret))
    return await call(client.authentication.Authenticate, request)


async def tokens(client: Any, who: Principal, tenant: str = "") -> list[pb.Token]:
    request = pb.ListTokensRequest(tenant=tenant)
    return list((await call(client.access.ListTokens, request, on_behalf_of=who)).tokens)


async def audit(client: Any, who: Principal = ROOT, **fields: Any) -> list[pb.AuditEntry]:
    request = pb.ListAuditRequest(**fields)
    return list((await call(client.access.ListAudit, request, on_behalf_of=who)).entries)


async def job_of(client: Any, who: Principal, **changes: Any) -> str:
    spec = {
        "name": "sums",
        "model": {"path": "m"},
        "tasks": {"environment": "arithmetic"},
        "reward": ["exact"],
        "tenant": who.tenant,
    }
    request = jobs_pb2.SubmitJobRequest(
        spec_json=json.dumps(spec | changes), files={"config.json": b"{}"}
    )
    job = await call(client.jobs.SubmitJob, request, on_behalf_of=who)
    return job.status.job_id


async def test_a_token_is_shown_once_and_works(client: Any, store_url: str, tmp_path: Path) -> None:
    made = await create(client, expires_in_s=60.0)
    found = await authenticate(client, made.secret)
    assert found.principal.token_id == made.token.token_id == token_id_of(made.secret)
    assert (found.principal.name, found.principal.tenant) == ("ann", "a")
    assert found.principal.role == options_pb2.ROLE_SUBMIT
    assert 0 < found.expires_in_s <= 60
    (listed,) = await tokens(client, ROOT)
    assert (listed.created_by, listed.revoked) == ("bootstrap", False)
    assert listed.HasField("used_s")
    assert made.secret not in str(listed)
    assert not made.token.HasField("used_s")


async def test_neither_the_store_nor_the_log_holds_the_secret(
    client: Any, store_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from paceline_experience.store.store import Store

    made = await create(client)
    secret = made.secret.rpartition("_")[2].encode()
    store = await Store.connect(store_url)
    record = await store.command("HGETALL", f"{{access}}:token:{made.token.token_id}")
    entries = await store.command("XRANGE", "{access}:audit", "-", "+")
    await store.close()
    files = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert token_digest(made.secret).hex() in repr(record)
    for place in (repr(record).encode(), repr(entries).encode(), files, caplog.text.encode()):
        assert secret not in place


async def test_unknown_revoked_and_expired_tokens_are_refused_alike(client: Any) -> None:
    revoked = await create(client)
    await revoke(client, ROOT, revoked.token.token_id)
    short = await create(client, expires_in_s=0.01)
    await asyncio.sleep(0.05)
    other = await create(client)
    nobodys = f"pl_{'0' * 12}_{'0' * 64}"
    mixed = other.secret[:-1] + ("0" if other.secret[-1] != "0" else "1")
    said: set[str] = set()
    for secret in (nobodys, revoked.secret, short.secret, mixed):
        with pytest.raises(AuthenticationError) as caught:
            await authenticate(client, secret)
        said.add(caught.value.message)
    assert said == {"the token is not valid"}
    await authenticate(client, other.secret)
    assert {each.token_id: each.revoked for each in await tokens(client, ROOT)} == {
        revoked.token.token_id: True,
        short.token.token_id: False,
        other.token.token_id: False,
    }


async def test_an_admin_of_a_tenant_stays_in_it(client: Any) -> None:
    mine, theirs = await create(client, CHIEF, tenant=""), await create(client, tenant="b")
    assert mine.token.tenant == "a"
    assert [each.token_id for each in await tokens(client, CHIEF)] == [mine.token.token_id]
    assert await tokens(client, CHIEF, "b") == []
    for tenant in ("b", ALL_TENANTS):
        with pytest.raises(PermissionDeniedError, match=r"^tenant: "):
            await create(client, CHIEF, tenant=tenant)
    said: list[str] = []
    for token_id in (theirs.token.token_id, "0" * 12):
        with pytest.raises(NotFoundError) as caught:
            await revoke(client, CHIEF, token_id)
        said.append(caught.value.message.replace(token_id, "ID"))
    assert said[0] == said[1]
    await authenticate(client, theirs.secret)


@pytest.mark.parametrize(
    ("field", "value"),
    [("name", ""), ("name", "a\nb"), ("tenant", "A"), ("role", 99), ("expires_in_s", -1.0)],
)
async def test_a_wrong_field_is_named(client: Any, field: str, value: Any) -> None:
    with pytest.raises(InvalidError, match=f"^{field}: "):
        await create(client, **{field: value})
    assert await tokens(client, ROOT) == []


async def test_only_admins_deal_with_tokens_and_the_log(client: Any) -> None:
    with pytest.raises(PermissionDeniedError, match="role admin"):
        await create(client, ANN)
    for ask in (tokens(client, ANN), audit(client, ANN)):
        with pytest.raises(PermissionDeniedError, match="role admin"):
            await ask


def calls_of(client: Any, job_id: str, who: Principal) -> dict[str, Callable[[], Awaitable[Any]]]:
    """All calls about a job."""
    jobs = client.jobs

    async def watch() -> None:
        request = jobs_pb2.WatchJobRequest(job_id=job_id)
        async for _ in stream(jobs.WatchJob, request, timeout_s=60.0, on_behalf_of=who):
            return

    def ask(method: Any, request: Any) -> Callable[[], Awaitable[Any]]:
        return lambda: call(method, request, on_behalf_of=who)

    return {
        "get": ask(jobs.GetJob, jobs_pb2.GetJobRequest(job_id=job_id)),
        "watch": watch,
        "metrics": ask(jobs.ListMetrics, jobs_pb2.ListMetricsRequest(job_id=job_id)),
        "trajectories": ask(jobs.ListTrajectories, jobs_pb2.ListTrajectoriesRequest(job_id=job_id)),
        "audit": ask(jobs.VerifyJob, jobs_pb2.VerifyJobRequest(job_id=job_id)),
        "weights": ask(jobs.ListWeights, ListWeightsRequest(job_id=job_id)),
        "cancel": ask(jobs.CancelJob, jobs_pb2.CancelJobRequest(job_id=job_id)),
    }


async def test_a_job_of_another_tenant_does_not_exist(client: Any) -> None:
    job_id = await job_of(client, ANN)
    for name, ask in calls_of(client, job_id, BOB).items():
        nobodys = calls_of(client, "sums-000000", BOB)[name]
        said: list[tuple[type[PacelineError], str]] = []
        for each, shown in ((ask, job_id), (nobodys, "sums-000000")):
            with pytest.raises(PacelineError) as caught:
                await each()
            said.append((type(caught.value), caught.value.message.replace(shown, "ID")))
        assert said[0] == said[1] == (NotFoundError, "job 'ID' is not known"), name
    for who in (ANN, ROOT):
        for ask in calls_of(client, job_id, who).values():
            await ask()


async def test_lists_hold_what_the_caller_may_see(client: Any) -> None:
    mine, theirs = await job_of(client, ANN), await job_of(client, BOB)

    async def listed(who: Principal, tenant: str = "") -> set[str]:
        request = jobs_pb2.ListJobsRequest(tenant=tenant)
        reply = await call(client.jobs.ListJobs, request, on_behalf_of=who)
        return {job.status.job_id for job in reply.jobs}

    assert await listed(ANN) == await listed(ANN, "a") == {mine}
    assert await listed(ANN, "b") == await listed(ANN, "nobody") == set()
    assert await listed(ROOT) == {mine, theirs}
    assert await listed(ROOT, "b") == {theirs}


async def test_a_job_of_another_tenant_cannot_be_made(client: Any) -> None:
    with pytest.raises(PermissionDeniedError, match=r"^tenant: 'b' is not the tenant"):
        await job_of(client, ANN, tenant="b")
    with pytest.raises(PermissionDeniedError, match="role submit"):
        await job_of(client, Principal("a2", "reader", "a", Role.READ))


async def test_every_change_is_in_the_log_with_its_end(client: Any, tmp_path: Path) -> None:
    made = await create(client)
    job_id = await job_of(client, ANN)
    with pytest.raises(NotFoundError):
        await calls_of(client, job_id, BOB)["cancel"]()
    await calls_of(client, job_id, ANN)["cancel"]()
    found = [
        (e.action, e.principal.name, e.tenant, e.target, e.outcome) for e in await audit(client)
    ]
    assert found == [
        ("job.cancel", "ann", "a", job_id, pb.AUDIT_OUTCOME_OK),
        ("job.cancel", "bob", "b", job_id, pb.AUDIT_OUTCOME_REFUSED),
        ("job.submit", "ann", "a", job_id, pb.AUDIT_OUTCOME_OK),
        ("token.create", "bootstrap", "a", made.token.token_id, pb.AUDIT_OUTCOME_OK),
    ]
    (newest, *_) = await audit(client)
    assert newest.principal.source == "10.0.0.3"
    assert newest.time.endswith("Z")
    assert [e.action for e in await audit(client, action="token.")] == ["token.create"]
    assert {e.tenant for e in await audit(client, CHIEF)} == {"a"}
    assert await audit(client, CHIEF, tenant="b") == []
    lines = (tmp_path / "audit" / "experience-0.jsonl").read_text().splitlines()
    assert [json.loads(line)["action"] for line in lines] == [e[0] for e in reversed(found)]


async def test_the_log_is_read_in_pages(client: Any) -> None:
    for _ in range(5):
        await create(client)
    seen: list[str] = []
    before = ""
    while True:
        request = pb.ListAuditRequest(before=before, page_size=2)
        reply = await call(client.access.ListAudit, request, on_behalf_of=ROOT)
        seen += [entry.id for entry in reply.entries]
        before = reply.next
        if not before:
            break
    assert len(seen) == len(set(seen)) == 5
    with pytest.raises(InvalidError, match=r"^before: "):
        await audit(client, before="newest")


async def test_refusals_are_noted_with_their_number(client: Any) -> None:
    stranger = pb.Principal(source="10.9.9.9")
    refusal = pb.Refusal(principal=stranger, action="call", detail="invalid", count=7)
    await call(client.authentication.ReportRefusals, pb.ReportRefusalsRequest(refusals=[refusal]))
    (entry,) = await audit(client)
    assert (entry.outcome, entry.count, entry.principal.source) == (
        pb.AUDIT_OUTCOME_REFUSED,
        7,
        "10.9.9.9",
    )
    assert (entry.principal.name, entry.principal.role, entry.tenant) == ("", 0, "*")
    assert await audit(client, CHIEF) == []
