"""Who changed what, when, from where, and whether it was allowed: streams, only appended to."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import chain
from logging import LogRecord, makeLogRecord
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from paceline.access import ALL_TENANTS, Principal
from paceline.errors import InvalidError, PacelineError, StoreError
from paceline.logs import Log
from paceline_experience.store import Store

# Who may do little can be refused often: that must not push out what was done.
_DONE, _NOT_DONE = "{access}:audit", "{access}:audit:refused"
_TEXT = 200
_CHUNK = 500
_ID = re.compile(r"[0-9]{1,19}(-[0-9]{1,19})?")
# Of entries looked at for one page: a filter that fits nothing must not hold up the store.
_MOST_LOOKED_AT = 10_000
_FILE_BYTES, _FILES = 16 << 20, 8
log = Log("audit")
Command = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that somebody did, or was refused."""

    id: str
    time: str  # ISO 8601, UTC, by the clock of the store
    token_id: str
    name: str
    tenant_of_caller: str
    role: str
    source: str
    action: str
    tenant: str  # whose matter it is; ALL_TENANTS: of nobody in particular
    target: str
    outcome: str  # ok | refused | failed
    detail: str
    count: int


@dataclass(slots=True)
class Change:
    """What is going on; fill in what is known only later."""

    tenant: str
    target: str = ""


class AuditLog:
    """The log in the store; what this process adds also goes to a rotated file and to its log.

    It keeps about `most` entries of what was done, and as many of what was refused or failed.
    """

    def __init__(self, store: Store, *, path: Path, most: int = 100_000) -> None:
        self._store = store
        self._most = most
        self._path = path
        self._file: RotatingFileHandler | None = None

    async def write(
        self,
        who: Principal,
        action: str,
        *,
        tenant: str,
        target: str = "",
        outcome: str = "ok",
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
        """What adds an entry, for who does it in one transaction with a change; then `export`."""
        flat = [part for item in fields.items() for part in item]
        stream = _DONE if fields["outcome"] == "ok" else _NOT_DONE
        return ("XADD", stream, "MAXLEN", "~", self._most, "*", *flat)

    def export(self, entry_id: bytes, fields: Mapping[str, str | int]) -> None:
        """Tell files and logs of an entry that is in the store."""
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
    ) -> AsyncGenerator[Change]:
        """Note how the work inside ends, before anybody is told of it."""
        async with self.refusals(who, action, tenant=tenant, target=target) as change:
            yield change
        await self.write(who, action, tenant=change.tenant, target=change.target)

    @asynccontextmanager
    async def refusals(
        self, who: Principal, action: str, *, tenant: str, target: str = ""
    ) -> AsyncGenerator[Change]:
        """Note only if the work inside does not come to a good end."""
        change = Change(tenant, target)
        try:
            yield change
        except PacelineError as error:
            # What an error says may quote what the caller sent, and that may be anything.
            outcome = "refused" if error.http < 500 else "failed"
            await self._note(who, action, change, outcome=outcome, detail=type(error).__name__)
            raise

    async def page(
        self, *, before: str = "", page_size: int = 0, tenant: str = "", action: str = ""
    ) -> tuple[list[Entry], str]:
        """Entries, newest first, and `before` of the next page; empty at the end.

        A page may be short, or empty, and still have a next one, or have one entry more.

        Raises:
            InvalidError: `before` is no id.
        """
        size = max(1, min(page_size or 100, 1000))
        found: list[Entry] = []
        last = _position(before)
        for _ in range(_MOST_LOOKED_AT // _CHUNK):
            chunk, more = await self._chunk(last)
            for entry in chunk:
                # Entries of both streams can have one id: no page ends between them.
                if len(found) >= size and entry.id != last:
                    return found, last
                last = entry.id
                if _wanted(entry, tenant=tenant, action=action):
                    found.append(entry)
            if not more:
                return found, ""
        return found, last

    async def _chunk(self, before: str) -> tuple[list[Entry], bool]:
        """Entries of both streams, newest first, and whether there are more."""
        most = f"({before}" if before else "+"
        parts = await self._store.together(
            *(("XREVRANGE", name, most, "-", "COUNT", _CHUNK) for name in (_DONE, _NOT_DONE))
        )
        found = sorted(map(_read, chain.from_iterable(parts)), key=_place, reverse=True)
        ends = [_place(_read(part[-1])) for part in parts if len(part) == _CHUNK]
        # Beyond the end of a part that was cut, the other one is not the whole truth.
        return [entry for entry in found if not ends or _place(entry) >= max(ends)], bool(ends)

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()

    async def _note(
        self, who: Principal, action: str, change: Change, *, outcome: str, detail: str
    ) -> None:
        """What did not happen is noted where possible; its own error counts for more."""
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
            log.error("not noted", action=action, who=who.name, outcome=outcome, error=error)

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
    outcome: str = "ok",
    detail: str = "",
    count: int = 1,
) -> dict[str, str | int]:
    """The fields of an entry in the store, each of a bounded length."""
    texts = {
        "token_id": who.token_id,
        "name": who.name,
        "tenant_of_caller": who.tenant,
        "role": who.role if who.name else "",  # nobody knows that of a stranger
        "source": who.source,
        "action": action,
        "tenant": tenant or ALL_TENANTS,
        "target": target,
        "outcome": outcome,
        "detail": detail,
    }
    return {key: text[:_TEXT] for key, text in texts.items()} | {"count": count}


def _wanted(entry: Entry, *, tenant: str, action: str) -> bool:
    fits = entry.action.startswith(action) if action.endswith(".") else entry.action == action
    return (not tenant or entry.tenant == tenant) and (not action or fits)


def _read(item: Any) -> Entry:
    entry_id, fields = item
    return _entry(entry_id.decode(), {key.decode(): text.decode() for key, text in fields.items()})


def _entry(entry_id: str, fields: Mapping[str, str]) -> Entry:
    moment = datetime.fromtimestamp(int(entry_id.partition("-")[0]) / 1000, UTC)
    time = moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    texts = {key: value for key, value in fields.items() if key != "count"}
    return Entry(id=entry_id, time=time, count=int(fields["count"]), **texts)


def _place(entry: Entry) -> tuple[int, ...]:
    return tuple(map(int, entry.id.split("-")))


def _position(before: str) -> str:
    if before and not _ID.fullmatch(before):
        raise InvalidError(f"before: {before!r} is no id of an entry")
    return before
