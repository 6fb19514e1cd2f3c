"""What a webhook is to be told, from the end of a job until its receiver has accepted it.

It is independent of the record of the job, which may be deleted meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from paceline.config.lifecycle.stopping import NotifySpec
from paceline.errors import InvalidError
from paceline.types import JobStatus

# Hash: job -> its `Notice`.
NOTICES = "{registry}:notices"


@dataclass(frozen=True, slots=True)
class Notice:
    """One notice and how far it has got; `first` and `due` are in seconds since the epoch."""

    notice_id: str  # the same in every attempt
    job_id: str
    tenant: str
    url: str
    secret: str  # its name; empty: unsigned
    content: dict[str, Any]
    first: float = 0.0  # when it was first tried; 0: not yet
    attempt: int = 0  # failed ones so far
    due: float = 0.0

    def to_json(self) -> bytes:
        """As it is stored."""
        return _NOTICE.dump_json(self)

    def failed(self, now: float, wait_s: float) -> Notice:
        """The same after one more attempt in vain; the next comes `wait_s` later."""
        first = self.first or now
        return replace(self, first=first, attempt=self.attempt + 1, due=now + wait_s)


_NOTICE = TypeAdapter(Notice)


def notice_of(status: JobStatus, notify: NotifySpec) -> Notice:
    """The notice of the end of a job."""
    notice_id = f"{status.job_id}.ended"
    content = {
        "type": "job.ended",
        "id": notice_id,
        "job_id": status.job_id,
        "name": status.name,
        "tenant": status.tenant,
        "state": status.state,
        "reason": status.reason,
        "step": status.step,
        "eval_reward": status.eval_reward,
        "finished_at": status.finished_at,
    }
    return Notice(notice_id, status.job_id, status.tenant, notify.webhook, notify.secret, content)


def parse_notice(text: bytes) -> Notice:
    """A stored notice.

    Raises:
        InvalidError: this version cannot parse it.
    """
    try:
        return _NOTICE.validate_json(text)
    except ValidationError as error:
        raise InvalidError(f"its notice cannot be read: {error}") from None
