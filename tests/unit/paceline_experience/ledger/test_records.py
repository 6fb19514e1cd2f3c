"""Records of the ledger come back from the store as they went, through the JSON of Lua too."""

from __future__ import annotations

from dataclasses import fields, replace

from hypothesis import given, settings
from redis import Redis

from paceline_experience.ledger.records import (
    BatchRecord,
    LedgerMeta,
    field_texts,
    parse_record,
    record_text,
)
from paceline_harness.nouns import nouns

_SAME = "return cjson.encode(cjson.decode(ARGV[1]))"


@given(nouns(LedgerMeta), nouns(LedgerMeta))
def test_fields_of_the_job_come_back(before: LedgerMeta, after: LedgerMeta) -> None:
    texts = field_texts(**{each.name: getattr(after, each.name) for each in fields(after)})
    assert before.changed(texts) == after
    assert before.changed({}) is before


@settings(max_examples=30, deadline=None)
@given(batch=nouns(BatchRecord))
def test_what_scripts_pass_on_is_not_rounded(redis_socket: str, batch: BatchRecord) -> None:
    with Redis(unix_socket_path=redis_socket) as redis:
        batch = replace(batch, groups=(*batch.groups, "g"))  # Lua takes an empty list for a table
        assert parse_record(BatchRecord, redis.eval(_SAME, 0, record_text(batch))) == batch
