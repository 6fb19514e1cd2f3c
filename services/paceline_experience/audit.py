"""Counts everything in the store again and compares it with the counters."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from paceline_experience.book import payload_name
from paceline_experience.core import Core
from paceline_experience.counts import by_reason, by_state, identity
from paceline_experience.payloads import PayloadStore
from paceline_experience.store import LETTERS

_STATES = {letter: str(state) for state, letter in LETTERS.items()}
_LIVE = ["queued", "leased", "finished", "ready", "taken", "trained"]


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What the books say and where they disagree."""

    job_id: str
    ok: bool
    counts: dict[str, int]  # episodes by state, and `admitted`
    dropped: dict[str, int]  # episodes by reason
    problems: tuple[str, ...]


async def audit(core: Core, payloads: PayloadStore) -> AuditReport:
    """Check the ledger's identity and everything that follows from it."""
    async with core.transaction():
        keys = core.keys
        counts, groups, batches, meta = await core.store.hashes(
            keys.counts, keys.groups, keys.batches, keys.meta
        )
        kept = await payloads.sizes()
        listed = await core.listed()
    numbers = Counter({k.decode(): int(v) for k, v in counts.items()})
    records = {k.decode(): json.loads(v) for k, v in groups.items()}
    fixed = {int(k): json.loads(v) for k, v in batches.items()}
    step = int(meta.get(b"step", b"0"))
    problems = [
        *identity(numbers),
        *_recount(numbers, records),
        *_groups(numbers, records),
        *_batches(fixed, records, step),
        *_payloads(records, kept),
        *(f"trajectory {name} is listed, but its payload is gone" for name in listed - kept.keys()),
    ]
    return AuditReport(
        job_id=core.job_id,
        ok=not problems,
        counts=by_state(numbers),
        dropped=by_reason(numbers),
        problems=tuple(problems),
    )


def _recount(numbers: Counter[str], records: dict[str, Any]) -> Iterable[str]:
    found = Counter[str]()
    for record in records.values():
        kind = "eval:" if "e" in record else ""
        found.update(kind + _STATES[letter] for letter in record["s"])
    for name in [*_LIVE, "eval:queued", "eval:leased"]:
        if found[name] != numbers[name]:
            yield f"{name}: counted {numbers[name]}, found {found[name]}"


def _groups(numbers: Counter[str], records: dict[str, Any]) -> Iterable[str]:
    training = [r for r in records.values() if "e" not in r]
    accepted = sum("k" in r for r in training) + numbers["groups:durable"]
    if accepted != numbers["groups:accepted"]:
        yield f"accepted groups: counted {numbers['groups:accepted']}, found {accepted}"
    still_open = sum("k" not in r for r in training)
    if still_open != numbers["groups:open"]:
        yield f"open groups: counted {numbers['groups:open']}, found {still_open}"
    for name, record in records.items():
        states = set(record["s"])
        if len(states) > 1 and not states <= set("qlf"):
            yield f"group {name} is in states {record['s']}"


def _batches(fixed: dict[int, Any], records: dict[str, Any], step: int) -> Iterable[str]:
    owner: dict[str, int] = {}
    for number, batch in fixed.items():
        wanted = "n" if batch["committed"] else "t"
        if bool(batch["committed"]) != (number < step):
            yield f"batch of step {number} is {'' if batch['committed'] else 'not '}committed"
        for name in batch["groups"]:
            if name in owner:
                yield f"group {name} is in the batches of steps {owner[name]} and {number}"
            owner[name] = number
            states = records.get(name, {"s": ""})["s"]
            if not states or states.strip(wanted):
                yield f"group {name} of step {number} is in states {states!r}"
    for name, record in records.items():
        if record["s"][0] in "tn" and name not in owner:
            yield f"group {name} is {_STATES[record['s'][0]]} in no batch"


def _payloads(records: dict[str, Any], kept: dict[str, int]) -> Iterable[str]:
    for name, record in records.items():
        for index, facts in enumerate(record["f"]):
            if facts:
                payload = payload_name(name, index, int(facts.partition(",")[0]))
                if payload not in kept:
                    yield f"payload {payload} is gone"
