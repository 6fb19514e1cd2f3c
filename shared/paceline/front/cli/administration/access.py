"""`paceline tokens` and `paceline audit-log`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable

from paceline.errors import ConfigError
from paceline.front.api.documents import AuditEntryView, TokenView
from paceline.front.cli.entry import Exit
from paceline.front.cli.target.clients import client_of, reader_of
from paceline.front.cli.terminal.console import SafeConsole
from paceline.front.cli.terminal.printing import say
from paceline.front.cli.terminal.tables import Column, FittingTable
from paceline.front.client.client import Client

DAY_S = 86_400.0
_PAGE = 1000


def create(arguments: Namespace) -> int:
    """`paceline tokens create NAME`: the token alone on standard output."""
    days: float | None = arguments.days
    if days is not None and days <= 0:
        raise ConfigError(f"--days: {days:g} is not allowed; must be a positive number")
    with client_of(arguments) as client:
        issued = client.create_token(
            arguments.name,
            role=arguments.role,
            tenant=arguments.tenant,
            expires_in_s=None if days is None else days * DAY_S,
            no_code=arguments.no_code or None,
        )
    token = issued.token
    say(issued.secret)
    say(
        f"{token.token_id}: {token.role} of {_tenant(token.tenant)}; "
        "save it now, it is not shown again",
        error=True,
    )
    return Exit.OK


def list_tokens(arguments: Namespace) -> int:
    """`paceline tokens list`."""
    with reader_of(arguments) as client:
        tokens = client.list_tokens(tenant=arguments.tenant).tokens
    SafeConsole().print(token_table(tokens))
    return Exit.OK


def token_table(tokens: Iterable[TokenView]) -> FittingTable:
    """One row per token."""
    table = FittingTable(
        *("id", "name", Column("tenant", 1), "role", Column("age", 3), Column("used", 2), "ends"),
        Column("made by", 4),
    )
    for token in tokens:
        table.add_row(*_row(token))
    return table


def revoke(arguments: Namespace) -> int:
    """`paceline tokens revoke ID`."""
    with client_of(arguments) as client:
        token = client.revoke_token(arguments.token)
    say(f"{token.token_id}: revoked")
    return Exit.OK


def audit_log(arguments: Namespace) -> int:
    """`paceline audit-log`: the newest entries in chronological order, as in a log."""
    with reader_of(arguments) as client:
        entries = _newest(client, arguments.lines, arguments.tenant, arguments.action)
    if arguments.json:
        for entry in reversed(entries):
            say(entry.model_dump_json())
        return Exit.OK
    SafeConsole().print(audit_table(reversed(entries)))
    return Exit.OK


def audit_table(entries: Iterable[AuditEntryView]) -> FittingTable:
    """One row per entry."""
    table = FittingTable(
        *("time", "who", Column("role", 3), Column("from", 4), "action", Column("tenant", 2)),
        *(Column("target", is_long=True), "outcome", Column("detail", 1, is_long=True)),
    )
    for entry in entries:
        table.add_row(*_cells(entry))
    return table


def _newest(client: Client, number: int, tenant: str, action: str) -> list[AuditEntryView]:
    entries: list[AuditEntryView] = []
    before = ""
    while len(entries) < number:
        size = min(_PAGE, number - len(entries))
        page = client.list_audit(before=before, page_size=size, tenant=tenant, action=action)
        entries += page.entries
        before = page.next
        if not before:
            break
    return entries


def _row(token: TokenView) -> tuple[str, ...]:
    ends = "revoked" if token.revoked else _ends(token.expires_in_s)
    used = "never" if token.used_s is None else f"{_span(token.used_s)} ago"
    return (
        token.token_id,
        token.name,
        token.tenant,
        f"{token.role}, no code" if token.no_code else token.role,
        _span(token.age_s),
        used,
        ends,
        token.created_by,
    )


def _cells(entry: AuditEntryView) -> tuple[str, ...]:
    detail = entry.detail if entry.count == 1 else f"{entry.detail} ({entry.count} times)"
    return (
        entry.time,
        entry.principal.name or "?",
        entry.principal.role or "",
        entry.principal.source,
        entry.action,
        entry.tenant,
        entry.target,
        entry.outcome,
        detail,
    )


def _ends(left_s: float | None) -> str:
    if left_s is None:
        return "never"
    return f"in {_span(left_s)}" if left_s > 0 else "expired"


def _span(seconds: float) -> str:
    for unit, size in (("d", DAY_S), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _tenant(tenant: str) -> str:
    return "all tenants" if tenant == "*" else f"tenant {tenant}"
