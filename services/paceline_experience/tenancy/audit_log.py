"""Who changed what, when, from where, and whether it was allowed: append-only streams."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import chain
from logging import LogRecord, makeLogRecord
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from paceline.enums import AuditOutcome
from paceline.errors import InvalidError, NotFoundError, PacelineError, StoreError
from paceline.platform.telemetry.logs import Log
from paceline.platform.transport.principal import ALL_TENANTS, Principal, Role
from paceline_experience.store.store import Store

# In separate streams, so that many refusals cannot push out entries of what was done.
_DONE, _NOT_DONE = "{access}:audit", "{access}:audit:refused"
_MAX_CHARS = 200
_CHUNK = 500
_ID = re.compile(r"[0-9]{1,19}(-[0-9]{1,19})?")
# Entries scanned for one page: a filter that matches nothing must not block the store.
_MAX_SCANNED = 10_000
_MAX_RECENT = 4096
_FILE_BYTES, _FILES = 16 << 20, 8
log = Log("audit")
Command = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """Something that a caller did or was refused."""

    id: str
    time: str  # ISO 8601, UTC, by the clock of the store
    token_id: str
    name: str
    tenant_of_caller: str
    role: Role | None  # None: nobody knows that of a stranger
    source: str
    action: str
    tenant: str  # the tenant concerned; ALL_TENANTS: none in particular
    target: str
    outcome: AuditOutcome
    detail: str
    count: int


@dataclass(slots=True)
class AuditedChange:
    """A change in progress; fields can be set when they become known."""

    tenant: str
    target: str = ""
    repeated: bool = False
    """It has changed nothing, since it was done before: a retry, or somebody waits. No entry."""


class AuditLog:
    """The log in the store; entries of this process also go to a rotated file and to its log.

    Keeps about `max_entries` of what was done, and as many of what was refused or failed.
    """

    def __init__(self, store: Store, *, path: Path, max_entries: int = 100_000) -> None:
        self._store = store
        self._max_entries = max_entries
        self._path = path
        self._file: RotatingFileHandler | None = None
        # Callers, actions and targets of recent changes: some targets are gone since.
        self._recent: OrderedDict[tuple[str, str, str], None] = OrderedDict()

    async def write(
        self,
        who: Principal,
        action: str,
        *,
        tenant: str,
        target: str = "",
        outcome: AuditOutcome = AuditOutcome.OK,
        detail: str = "",
        count: int = 1,
    ) -> None:
        """Add an entry; it is in the store when this returns.

        Raises:
            StoreError: it is not.
        """
        fields = fields_of(
            who, action, tenant=tenant, target=target, outcome=outcome, detail=detail, count=count
        )
        entry_id = await self._store.command(*self.command(fields))
        self.export(entry_id, fields)

    def command(self, fields: Mapping[str, str | int]) -> Command:
        """The command that adds an entry, for a transaction with a change; then call `export`."""
        flat = [part for item in fields.items() for part in item]
        stream = _DONE if fields["outcome"] == AuditOutcome.OK else _NOT_DONE
        return ("XADD", stream, "MAXLEN", "~", self._max_entries, "*", *flat)

    def export(self, entry_id: bytes, fields: Mapping[str, str | int]) -> None:
        """Write an entry of the store to the file and the log."""
        entry = _entry(entry_id.decode(), {key: str(value) for key, value in fields.items()})
        log.info(
            entry.action,
            id=entry.id,
            who=entry.name,
            token=entry.token_id,
            source=entry.source,
            tenant=entry.tenant,
            target=entry.target,
            outcome=entry.outcome,
            detail=entry.detail,
            count=entry.count,
        )
        self._append(makeLogRecord({"msg": json.dumps(asdict(entry))}))

    @asynccontextmanager
    async def change(
        self, who: Principal, action: str, *, tenant: str, target: str = ""
    ) -> AsyncGenerator[AuditedChange]:
        """Record how the work inside ends, before the caller gets an answer."""
        async with self.refusals(who, action, tenant=tenant, target=target) as change:
            yield change
        if not change.repeated:
            await self.write(who, action, tenant=change.tenant, target=change.target)
            self._remember(who, action, change.target)

    def is_recent(self, who: Principal, action: str, target: str) -> bool:
        """Whether this process has recorded this lately."""
        return (who.token_id, action, target) in self._recent

    @asynccontextmanager
    async def refusals(
        self, who: Principal, action: str, *, tenant: str, target: str = ""
    ) -> AsyncGenerator[AuditedChange]:
        """Record the work inside only if it is refused or fails."""
        change = AuditedChange(tenant, target)
        try:
            yield change
        except PacelineError as error:
            if isinstance(error, NotFoundError) and self.is_recent(who, action, change.target):
                raise  # it waits until what it has deleted is gone
            # Only the type: a message may quote anything that the caller sent.
            outcome = AuditOutcome.REFUSED if error.http < 500 else AuditOutcome.FAILED
            await self._note(who, action, change, outcome=outcome, detail=type(error).__name__)
            raise

    async def page(
        self, *, before: str = "", page_size: int = 100, tenant: str = "", action: str = ""
    ) -> tuple[list[AuditEntry], str]:
        """Entries, newest first, and `before` of the next page; empty at the end.

        A page may be short, or empty, and still have a next one, or exceed `page_size` by one.

        Raises:
            InvalidError: `before` is not an id.
        """
        found: list[AuditEntry] = []
        last = _position(before)
        for _ in range(_MAX_SCANNED // _CHUNK):
            chunk, more = await self._chunk(last)
            for entry in chunk:
                # Entries of both streams can have the same id: no page ends between them.
                if len(found) >= page_size and entry.id != last:
                    return found, last
                last = entry.id
                if _matches(entry, tenant=tenant, action=action):
                    found.append(entry)
            if not more:
                return found, ""
        return found, last

    async def _chunk(self, before: str) -> tuple[list[AuditEntry], bool]:
        """Entries of both streams, newest first, and whether there are more."""
        max_id = f"({before}" if before else "+"
        parts = await self._store.transaction(
            *(("XREVRANGE", name, max_id, "-", "COUNT", _CHUNK) for name in (_DONE, _NOT_DONE))
        )
        found = sorted(map(_read, chain.from_iterable(parts)), key=_sort_key, reverse=True)
        ends = [_sort_key(_read(part[-1])) for part in parts if len(part) == _CHUNK]
        # Below the end of a stream's chunk, entries of that stream may be missing.
        return [entry for entry in found if not ends or _sort_key(entry) >= max(ends)], bool(ends)

    def _remember(self, who: Principal, action: str, target: str) -> None:
        self._recent[who.token_id, action, target] = None
        while len(self._recent) > _MAX_RECENT:
            self._recent.popitem(last=False)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    async def _note(
        self,
        who: Principal,
        action: str,
        change: AuditedChange,
        *,
        outcome: AuditOutcome,
        detail: str,
    ) -> None:
        """Record a refusal or failure if possible; the caller gets the original error anyway."""
        try:
            await self.write(
                who,
                action,
                tenant=change.tenant,
                target=change.target,
                outcome=outcome,
                detail=detail,
            )
        except StoreError as error:
            log.error(
                "not in the audit log", action=action, who=who.name, outcome=outcome, error=error
            )

    def _append(self, record: LogRecord) -> None:
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = RotatingFileHandler(
                    self._path, maxBytes=_FILE_BYTES, backupCount=_FILES
                )
            self._file.emit(record)
        except OSError as error:  # the store has it
            log.error("the audit file cannot be written", path=self._path, error=error)


def fields_of(
    who: Principal,
    action: str,
    *,
    tenant: str,
    target: str = "",
    outcome: AuditOutcome = AuditOutcome.OK,
    detail: str = "",
    count: int = 1,
) -> dict[str, str | int]:
    """The fields of an entry in the store, each of a bounded length."""
    texts = {
        "token_id": who.token_id,
        "name": who.name,
        "tenant_of_caller": who.tenant,
        "role": who.role if who.name else "",  # unknown for a caller without a valid token
        "source": who.source,
        "action": action,
        "tenant": tenant or ALL_TENANTS,
        "target": target,
        "outcome": outcome,
        "detail": detail,
    }
    return {key: text[:_MAX_CHARS] for key, text in texts.items()} | {"count": count}


def _matches(entry: AuditEntry, *, tenant: str, action: str) -> bool:
    fits = entry.action.startswith(action) if action.endswith(".") else entry.action == action
    return (not tenant or entry.tenant == tenant) and (not action or fits)


def _read(item: Any) -> AuditEntry:
    entry_id, fields = item
    return _entry(entry_id.decode(), {key.decode(): text.decode() for key, text in fields.items()})


def _entry(entry_id: str, fields: Mapping[str, str]) -> AuditEntry:
    moment = datetime.fromtimestamp(int(entry_id.partition("-")[0]) / 1000, UTC)
    time = moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    typed = {"count", "role", "outcome"}
    return AuditEntry(
        id=entry_id,
        time=time,
        role=Role(fields["role"]) if fields["role"] else None,
        outcome=AuditOutcome(fields["outcome"]),
        count=int(fields["count"]),
        **{key: value for key, value in fields.items() if key not in typed},
    )


def _sort_key(entry: AuditEntry) -> tuple[int, ...]:
    return tuple(map(int, entry.id.split("-")))


def _position(before: str) -> str:
    if before and not _ID.fullmatch(before):
        raise InvalidError(f"before: {before!r} is not the id of an entry")
    return before
