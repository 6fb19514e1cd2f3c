"""The credential of a worker that belongs to one job: a trainer or a rollout worker.

`plj_JOB/KIND/WORKER/INCARNATION/PROOF`: what it stands for, and an HMAC of that, keyed with a
secret of the job that only the experience service knows. So nothing has to be stored for each
credential, and none can be changed into that of another job, kind, worker or incarnation.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paceline.config.service import ServiceSettings
from paceline.enums import WorkerKind
from paceline.errors import AuthenticationError, ConfigError, InvalidError

JOB_KINDS: Final = frozenset({WorkerKind.TRAINER, WorkerKind.ROLLOUT})
"""Kinds whose workers belong to one job; the workers of all others are shared by all jobs."""
METADATA_KEY: Final = "authorization"
_SCHEME = "Bearer "
_PREFIX = "plj_"
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}"
_CLAIMS = re.compile(rf"plj_({_NAME})/(trainer|rollout)/({_NAME})/(0|[1-9][0-9]{{0,17}})")
_NOT_ISSUED = "the credential is malformed, or was not issued for this job by this installation"


@dataclass(frozen=True, slots=True)
class JobCredential:
    """What a credential stands for."""

    job_id: str
    kind: WorkerKind
    worker: str  # a worker, or a workload whose workers have names that begin with it
    incarnation: int = 0  # of a trainer; 0: a rollout worker

    def __str__(self) -> str:
        which = f"incarnation {self.incarnation} of " if self.incarnation else ""
        return f"the credential of {which}{self.worker}"

    def covers(self, worker_id: str) -> bool:
        """Whether it was issued to this worker."""
        return worker_id == self.worker or worker_id.startswith(f"{self.worker}-")


def sealed(credential: JobCredential, secret: bytes) -> str:
    """The text of a credential.

    Raises:
        InvalidError: it is of a kind without jobs, or a name in it has other characters.
    """
    claims = "/".join(
        (
            f"{_PREFIX}{credential.job_id}",
            credential.kind,
            credential.worker,
            str(credential.incarnation),
        )
    )
    if not _CLAIMS.fullmatch(claims):
        raise InvalidError(f"credential: {claims!r} does not name a trainer or rollout worker")
    return f"{claims}/{_proof(claims, secret)}"


def claimed(text: str) -> JobCredential:
    """What a credential says, which proves nothing yet: see `check_proof`.

    Raises:
        AuthenticationError: it is malformed.
    """
    found = _CLAIMS.fullmatch(text.rpartition("/")[0])
    if found is None:
        raise AuthenticationError(_NOT_ISSUED)
    job_id, kind, worker, incarnation = found.groups()
    return JobCredential(job_id, WorkerKind(kind), worker, int(incarnation))


def check_proof(text: str, secret: bytes) -> None:
    """Check in constant time that a credential was sealed with this secret.

    Raises:
        AuthenticationError: it was not.
    """
    claims, _, proof = text.rpartition("/")
    if not hmac.compare_digest(proof.encode(), _proof(claims, secret).encode()):
        raise AuthenticationError(_NOT_ISSUED)


def not_issued() -> AuthenticationError:
    """The error of a false credential; it does not tell whether there is such a job."""
    return AuthenticationError(_NOT_ISSUED)


def presented(context: Any) -> str:
    """The credential in the metadata of an RPC; empty: none."""
    pairs: Iterable[tuple[str, str | bytes]] = context.invocation_metadata() or ()
    value = dict(pairs).get(METADATA_KEY, "")
    text = value if isinstance(value, str) else value.decode("ascii", "replace")
    return text.removeprefix(_SCHEME)


def credential_of(settings: ServiceSettings) -> str:
    """The credential of this process; empty: it belongs to no job.

    Raises:
        ConfigError: its file cannot be read.
    """
    if settings.credential is None:
        return ""
    return _read(settings.credential)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not text"
        raise ConfigError(f"credential: {path}: {reason}") from None


def _proof(claims: str, secret: bytes) -> str:
    return hmac.digest(secret, claims.encode(), "sha256").hex()
