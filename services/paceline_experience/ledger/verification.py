"""Recounts everything in the store and compares it with the counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from paceline.enums import DropReason
from paceline_experience.ledger.context import LedgerContext
from paceline_experience.ledger.counts import by_reason, by_state, identity, replayed
from paceline_experience.ledger.records import BatchRecord, parse_record
from paceline_experience.ledger.replay.pool import Pool
from paceline_experience.ledger.state import GroupRecord, parse_group, parse_results
from paceline_experience.store.letters import LETTERS
from paceline_experience.store.payloads import PayloadStore

_STATES = {letter: str(state) for state, letter in LETTERS.items()}
# For these, a part of a group may be dropped.
_PARTLY = (DropReason.FILTERED, DropReason.SURPLUS, DropReason.REPAIRED, DropReason.REPLACED)
_LIVE = ["queued", "leased", "finished", "ready", "taken", "trained"]


@dataclass(frozen=True, slots=True)
class VerificationReport:
    """The counters, and what contradicts them."""

    job_id: str
    ok: bool
    counts: dict[str, int]  # episodes by state, and `admitted`
    dropped: dict[str, int]  # episodes by reason
    problems: tuple[str, ...]


async def verify(core: LedgerContext, payloads: PayloadStore) -> VerificationReport:
    """Check the ledger's identity and everything derived from it."""
    async with core.transaction():
        keys = core.keys
        counts, groups, results, batches, meta, stored = await core.store.hashes(
            keys.counts, keys.groups, keys.results, keys.batches, keys.meta, keys.replay
        )
        kept = await payloads.sizes()
        listed = await core.listed_payloads()
    numbers = Counter({k.decode(): int(v) for k, v in counts.items()})
    found = parse_results(results.keys(), results.values())
    records = [parse_group(k.decode(), v, results=found) for k, v in groups.items()]
    known = {record.group_id for record in records}
    fixed = [parse_record(BatchRecord, v) for v in batches.values()]
    step = int(meta.get(b"step") or 0)
    problems = [
        *identity(numbers),
        *_recount(numbers, records),
        *_groups(numbers, records),
        *_batches(fixed, records, step),
        *(f"results of group {name} are left" for name in found.keys() - known),
        *_payloads(records, kept),
        *_replay(core, stored, kept),
        *_guests(numbers, fixed, records),
        *(f"trajectory {name} is listed, but its payload is gone" for name in listed - kept.keys()),
    ]
    return VerificationReport(
        job_id=core.job_id,
        ok=not problems,
        counts=by_state(numbers) | replayed(numbers),
        dropped=by_reason(numbers),
        problems=tuple(problems),
    )


def _recount(numbers: Counter[str], records: Sequence[GroupRecord]) -> Iterable[str]:
    found = Counter[str]()
    for record in records:
        kind = "eval:" if record.is_eval else ""
        found.update(kind + _STATES[letter] for letter in record.states)
    for name in [*_LIVE, "eval:queued", "eval:leased"]:
        if found[name] != numbers[name]:
            yield f"{name}: counted {numbers[name]}, found {found[name]}"
    partly = sum(numbers[f"drop:{reason}"] for reason in _PARTLY)
    if found["dropped"] > partly:
        yield f"dropped parts of groups: counted {partly}, found {found['dropped']}"


def _groups(numbers: Counter[str], records: Sequence[GroupRecord]) -> Iterable[str]:
    training = [record for record in records if not record.is_eval]
    accepted = sum(record.accepted for record in training) + numbers["groups:durable"]
    if accepted != numbers["groups:accepted"]:
        yield f"accepted groups: counted {numbers['groups:accepted']}, found {accepted}"
    still_open = sum(not record.accepted for record in training)
    if still_open != numbers["groups:open"]:
        yield f"open groups: counted {numbers['groups:open']}, found {still_open}"
    for record in records:
        decided = set(record.remaining)
        unfinished = set("qlm" if record.is_eval else "qlf")
        is_open = not record.accepted and bool(decided) and decided <= unfinished
        if not is_open and (len(decided) != 1 or decided <= set("qlf")):
            yield f"group {record.group_id} is in states {record.states}"
        if len(record.finished()) != len(record.remaining.replace("q", "").replace("l", "")):
            yield f"group {record.group_id} in states {record.states} has other results"


def _batches(
    fixed: Sequence[BatchRecord], records: Sequence[GroupRecord], step: int
) -> Iterable[str]:
    states = {record.group_id: record.remaining for record in records}
    owner: dict[str, int] = {}
    for batch in fixed:
        wanted = "n" if batch.committed else "t"
        if batch.committed != (batch.step < step):
            yield f"batch of step {batch.step} is {'' if batch.committed else 'not '}committed"
        for name in batch.groups:
            if name in owner:
                yield f"group {name} is in the batches of steps {owner[name]} and {batch.step}"
            owner[name] = batch.step
            if not states.get(name) or states[name].strip(wanted):
                yield f"group {name} of step {batch.step} is in states {states.get(name, '')!r}"
    for name, letters in states.items():
        if letters[:1] in ("t", "n") and name not in owner:
            yield f"group {name} is {_STATES[letters[0]]} in no batch"


def _payloads(records: Sequence[GroupRecord], kept: dict[str, int]) -> Iterable[str]:
    for record in records:
        for name in record.member_payloads():
            if name not in kept:
                yield f"payload {name} is gone"


def _replay(
    core: LedgerContext, stored: Mapping[bytes, bytes], kept: dict[str, int]
) -> Iterable[str]:
    """The pool is within its bounds, known, and can be read."""
    spec = core.spec.experience.replay
    pool = Pool(stored, unfixed=core.state.unfixed_step())
    records = {each.key: each for each in pool.records()}
    if records.keys() != {key.decode() for key in stored}:
        yield f"the pool has {len(stored)} entries, of which {len(records)} are what they say"
    if records != {each.key: each for each in core.state.pool.records()}:
        yield f"the pool has {len(stored)} entries, but {len(core.state.pool)} are known"
    most, num_bytes = (spec.per_task, spec.pool_bytes) if spec is not None else (0, 0)
    for found, of_a_task in pool.sizes():
        if found > num_bytes or of_a_task > most:
            yield f"the pool of {found} bytes, {of_a_task} per task, is too large"
    for name in pool.payloads - kept.keys():
        yield f"payload {name} is in the pool, but gone"


def _guests(
    numbers: Counter[str], fixed: Sequence[BatchRecord], records: Sequence[GroupRecord]
) -> Iterable[str]:
    """Guests are counted once, with the batch that was trained, and are nobody's own."""
    guests = {record.group_id: len(record.guests) for record in records}
    for record in records:
        names = [each.payload for each in record.guests]
        if len({*names}) < len(names) or not {*names}.isdisjoint(record.payloads()):
            yield f"group {record.group_id} has a guest twice"
        if names and not record.accepted:
            yield f"group {record.group_id} has guests, but is in states {record.states}"
    for batch in fixed:
        found = sum(guests.get(name, 0) for name in batch.groups)
        if batch.stats.replayed != found:
            yield f"batch of step {batch.step} says {batch.stats.replayed} guests, it has {found}"
    total = numbers["replayed:durable"] + sum(b.stats.replayed for b in fixed if b.counted)
    if total != numbers["replayed"]:
        yield f"replayed: counted {numbers['replayed']}, found {total}"
