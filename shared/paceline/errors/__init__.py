"""The error hierarchy. Each class has a gRPC and an HTTP status.

PacelineError                INTERNAL             500
├── InvalidError             INVALID_ARGUMENT     422   a value the caller sent is wrong
│   ├── ConfigError          INVALID_ARGUMENT     422   a job file or settings file is wrong
│   ├── LimitError           INVALID_ARGUMENT     422   something is larger than a limit allows
│   ├── MalformedError       INVALID_ARGUMENT     400   a document is not JSON, or not YAML
│   ├── MisfitError          INVALID_ARGUMENT     422   weights are not those of the engine's model
│   └── UnlistedError        INVALID_ARGUMENT     422   a function that the operator has not listed
├── NotFoundError            NOT_FOUND            404
├── ConflictError            ALREADY_EXISTS       409   same name, different content
├── StateError               FAILED_PRECONDITION  409   not allowed in the current state
│   ├── TransitionError      FAILED_PRECONDITION  409   illegal transition of a state machine
│   ├── FencedError          FAILED_PRECONDITION  409   caller of an older incarnation or epoch
│   ├── DeletedError         FAILED_PRECONDITION  409   what a repeated request has made is deleted
│   └── VersionGoneError     FAILED_PRECONDITION  409   a pinned policy version is not served
├── BusyError                RESOURCE_EXHAUSTED   429   full: back off and retry
│   ├── RateError            RESOURCE_EXHAUSTED   429   called too often: wait as long as it says
│   └── QuotaError           RESOURCE_EXHAUSTED   429   a tenant has reached its quota
├── UnavailableError         UNAVAILABLE          503   a peer cannot be reached: retry
│   ├── PendingError         UNAVAILABLE          503   goes on: repeat the same request later
│   └── StoreError           UNAVAILABLE          503   the experience store cannot be reached
├── DeadlineError            DEADLINE_EXCEEDED    504
├── IntegrityError           DATA_LOSS            500   bytes differ from their digest
├── AuthenticationError      UNAUTHENTICATED      401
└── PermissionDeniedError    PERMISSION_DENIED    403

To add one: subclass the closest class, set `grpc` and `http`, and extend this tree.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

MAX_MESSAGE = 4_000


class PacelineError(Exception):
    """Base of all errors that Paceline raises deliberately; the message says what to do."""

    grpc: str = "INTERNAL"
    """Name of the status code of gRPC."""
    http: int = 500

    def __str__(self) -> str:
        """The message, truncated and safe to send, since it may quote user input."""
        text = super().__str__()
        text = text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]}..."
        return text if text.isascii() else text.encode(errors="backslashreplace").decode()

    @property
    def message(self) -> str:
        """The message without the class name."""
        return str(self)

    @property
    def full_message(self) -> str:
        """The message as it was written: of any length, in any characters."""
        return super().__str__()


class InvalidError(PacelineError):
    """A value that the caller sent is wrong."""

    grpc = "INVALID_ARGUMENT"
    http = 422


class ConfigError(InvalidError):
    """A job file or a settings file is wrong."""


class LimitError(InvalidError):
    """Something is too large; the message names limit, size, maximum and who can raise it."""


class MalformedError(InvalidError):
    """A document cannot be parsed: it is not JSON, or not YAML, or not text at all."""

    http = 400


class MisfitError(InvalidError):
    """Weights are not those of the engine's model: the same bytes will not fit it another time."""


class UnlistedError(InvalidError):
    """A job names a function of an installed module that the operator has not listed."""


class NotFoundError(PacelineError):
    """No object has this name."""

    grpc = "NOT_FOUND"
    http = 404


class ConflictError(PacelineError):
    """The name is taken by a different object."""

    grpc = "ALREADY_EXISTS"
    http = 409


class StateError(PacelineError):
    """The operation is not allowed in the current state."""

    grpc = "FAILED_PRECONDITION"
    http = 409


class TransitionError(StateError):
    """An illegal transition of a state machine; names both states."""


class FencedError(StateError):
    """The caller has been replaced by a newer incarnation or owner."""


class DeletedError(StateError):
    """The request was answered before, and what it has made has been deleted since."""


class VersionGoneError(StateError):
    """A pinned policy version is no longer served."""


class BusyError(PacelineError):
    """No capacity at the moment: back off and retry."""

    grpc = "RESOURCE_EXHAUSTED"
    http = 429


class RateError(BusyError):
    """Called too often."""

    def __init__(self, message: str = "", retry_after_s: float = 1.0) -> None:
        """`retry_after_s`: when the next call is answered."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QuotaError(BusyError):
    """A tenant has reached its quota; the message names quota, usage and limit."""


class UnavailableError(PacelineError):
    """A peer cannot be reached: retry."""

    grpc = "UNAVAILABLE"
    http = 503


class PendingError(UnavailableError):
    """What was asked for takes longer than a request may, and goes on; repeat the same request."""


class StoreError(UnavailableError):
    """The experience store cannot be reached."""


class DeadlineError(PacelineError):
    """The deadline of the call has passed."""

    grpc = "DEADLINE_EXCEEDED"
    http = 504


class IntegrityError(PacelineError):
    """Bytes do not match their announced digest."""

    grpc = "DATA_LOSS"


class AuthenticationError(PacelineError):
    """Credentials are missing or unknown."""

    grpc = "UNAUTHENTICATED"
    http = 401


class PermissionDeniedError(PacelineError):
    """The credentials do not allow this."""

    grpc = "PERMISSION_DENIED"
    http = 403


@contextmanager
def plugin_boundary(
    what: str = "",
    *,
    passes: tuple[type[Exception], ...] = (),
    report: Callable[[], object] | None = None,
) -> Generator[None]:
    """Run code of a plug-in, of a job or of a package: whatever it raises becomes one error.

    Errors of `passes` stay what they are. `report` is called while the error is handled, so that a
    log has its traceback.

    Raises:
        InvalidError: `what`, with the class and the text of what was raised, be it `SystemExit`.
    """
    try:
        yield
    except passes:
        raise
    except (Exception, SystemExit) as error:  # the supervisor boundary of foreign code
        if report is not None:
            report()
        text = f"{type(error).__name__}: {error}"
        raise InvalidError(f"{what}: {text}" if what else text) from error


def every_class() -> list[type[PacelineError]]:
    """All classes of the hierarchy, parents before children."""
    found: list[type[PacelineError]] = [PacelineError]
    for cls in found:
        found.extend(cls.__subclasses__())
    return found
