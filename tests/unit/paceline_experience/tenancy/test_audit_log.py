from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.enums import AuditOutcome
from paceline.errors import InvalidError, NotFoundError
from paceline.platform.transport.principal import Principal, Role
from paceline_experience.store.store import Store
from paceline_experience.tenancy.audit_log import AuditEntry, AuditLog, fields_of
from paceline_experience.tenancy.tokens import Tokens

ANN = Principal("a1", "ann", "a", Role.SUBMIT, "10.0.0.3")
CHIEF = Principal("b1", "chief", "b", Role.ADMIN, "10.0.0.4")
MAX_ENTRIES = 200

OK, REFUSED = AuditOutcome.OK, AuditOutcome.REFUSED


@pytest.fixture
def audit(store: Store, tmp_path: Path) -> Iterator[AuditLog]:
    found = AuditLog(store, path=tmp_path / "audit.jsonl", max_entries=MAX_ENTRIES)
    yield found
    found.close()


async def walked(audit: AuditLog, page_size: int) -> list[AuditEntry]:
    """All pages together."""
    found, before = await audit.page(page_size=page_size)
    while before:
        more, before = await audit.page(page_size=page_size, before=before)
        found += more
    return found


async def test_refusals_push_out_nothing_that_was_done(audit: AuditLog, store: Store) -> None:
    await audit.write(CHIEF, "token.create", tenant="b")
    for number in range(3 * MAX_ENTRIES):
        with pytest.raises(NotFoundError):
            async with audit.refusals(ANN, "job.cancel", tenant="a", target=f"j{number}"):
                raise NotFoundError("job is not known")
    found = await walked(audit, 50)
    assert [entry.action for entry in found].count("token.create") == 1
    assert len(found) < 2 * MAX_ENTRIES + 100  # the store cuts whole nodes of a stream


async def test_pages_hold_what_was_done_and_what_was_refused_in_order(
    audit: AuditLog, store: Store
) -> None:
    """Also where both streams gave the same id, and beyond what is read at once."""
    for number in range(1, 1300):
        outcomes = (OK, REFUSED) if number % 5 == 0 else (OK,)
        for outcome in outcomes:
            fields = fields_of(ANN, "job.cancel", tenant="a", target=str(number), outcome=outcome)
            command = audit.command(fields)
            entry_id = command.index("*")
            flat = command[entry_id + 1 :]
            await store.command("XADD", command[1], f"{1000 + number // 2}-{number}", *flat)
    found = await walked(audit, 7)
    numbers = [int(entry.target) for entry in found]
    assert numbers == sorted(numbers, reverse=True)
    assert len(found) == 1299 + 1299 // 5
    assert sum(entry.outcome is REFUSED for entry in found) == 1299 // 5


async def test_no_text_of_an_entry_is_longer_than_its_bound(audit: AuditLog) -> None:
    long = "x" * 100_000
    who = Principal(long, long, long, Role.ADMIN, long)
    await audit.write(who, long, tenant=long, target=long, detail=long)
    ((entry,), _) = await audit.page()
    texts = (entry.name, entry.token_id, entry.tenant_of_caller, entry.source, entry.action)
    assert {len(text) for text in (*texts, entry.tenant, entry.target, entry.detail)} == {200}


async def test_a_page_ends_at_its_size(audit: AuditLog) -> None:
    for _ in range(3):
        await audit.write(ANN, "job.submit", tenant="a")
    found, before = await audit.page(page_size=1)
    assert (len(found), bool(before)) == (1, True)


async def test_an_invalid_tenant_is_not_recorded(audit: AuditLog, store: Store) -> None:
    with pytest.raises(InvalidError, match=r"^tenant: "):
        await Tokens(store, audit).create(CHIEF, name="x", role=Role.READ, tenant="No Tenant")
    ((entry,), _) = await audit.page()
    assert (entry.action, entry.tenant, entry.outcome) == ("token.create", "b", REFUSED)
