from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.errors import InvalidError, StateError
from paceline.platform.transport.principal import ALL_TENANTS, Principal, Role
from paceline_experience.store.store import Store
from paceline_experience.tenancy.audit_log import AuditLog
from paceline_experience.tenancy.tokens import Tokens

ROOT = Principal("", "bootstrap", ALL_TENANTS, Role.ADMIN)
MAX_TOKENS = 3


@pytest.fixture
def tokens(store: Store, tmp_path: Path) -> Iterator[Tokens]:
    audit = AuditLog(store, path=tmp_path / "audit.jsonl")
    yield Tokens(store, audit, max_per_tenant=MAX_TOKENS)
    audit.close()


async def made(tokens: Tokens, tenant: str = "a") -> str:
    token, _ = await tokens.create(ROOT, name="ann", role=Role.READ, tenant=tenant)
    return token.token_id


@pytest.mark.parametrize("name", ["bootstrap", "Controller", "experience", "service"])
async def test_tokens_cannot_have_reserved_names(tokens: Tokens, name: str) -> None:
    with pytest.raises(InvalidError, match=f"name: '{name}' is a name of the installation"):
        await tokens.create(ROOT, name=name, role=Role.READ, tenant="a")


async def test_of_the_tokens_that_are_over_the_newest_are_kept(
    tokens: Tokens, store: Store
) -> None:
    other = await made(tokens, "b")
    await tokens.revoke(ROOT, other)
    revoked: list[str] = []
    for _ in range(MAX_TOKENS + 4):
        revoked.append(await made(tokens))
        await tokens.revoke(ROOT, revoked[-1])
    live = await made(tokens)
    assert [each.token_id for each in await tokens.listed("a")] == [*revoked[-MAX_TOKENS:], live]
    assert [each.token_id for each in await tokens.listed("b")] == [other]
    # Nothing of the others is left.
    assert len(await store.redis.keys("{access}:token:*")) == MAX_TOKENS + 2


async def test_a_tenant_has_so_many_that_open_something(tokens: Tokens) -> None:
    held = [await made(tokens) for _ in range(MAX_TOKENS)]
    with pytest.raises(StateError, match="tenant 'a' has 3 tokens"):
        await made(tokens)
    await made(tokens, "b")
    await tokens.revoke(ROOT, held[0])
    await made(tokens)


async def test_a_list_reads_the_tokens_of_its_tenant(tokens: Tokens, store: Store) -> None:
    async def reads() -> int:
        before = (await store.redis.info("commandstats"))["cmdstat_hgetall"]["calls"]
        await tokens.listed("b")
        return (await store.redis.info("commandstats"))["cmdstat_hgetall"]["calls"] - before

    for _ in range(MAX_TOKENS):
        await made(tokens)
    await made(tokens, "b")
    await tokens.listed()
    assert await reads() == 1
