"""Errors of data: which are the fault of a row, and which of a machine or a volume."""

from __future__ import annotations

from paceline.errors import InvalidError, PacelineError, UnavailableError


class RowError(InvalidError):
    """A row cannot be a task; whoever reads it adds file and line."""


class MissingDataError(InvalidError):
    """There is no such file or folder, or it may not be read; a volume may bring it back."""


class UnreadError(InvalidError):
    """The process that reads a source took too long or was ended: by its file, or its machine."""


_KINDS: dict[str, type[PacelineError]] = {
    each.__name__: each for each in (InvalidError, MissingDataError, UnreadError, UnavailableError)
}
MAX_ERROR_CHARS = 2000


def answer_of(error: InvalidError | UnavailableError) -> list[str]:
    """Kind and message of an error, for `raise_answer` in another process."""
    kind = next(each.__name__ for each in type(error).__mro__ if each.__name__ in _KINDS)
    return [kind, error.message[:MAX_ERROR_CHARS] or "cannot be read"]


def raise_answer(answer: list[str]) -> None:
    """Raise the error that another process has answered; nothing if it answered with none."""
    if answer:
        kind, message = answer
        raise _KINDS[kind](message)


def of_os_error(what: str, error: OSError) -> MissingDataError | UnavailableError:
    """The error for a file that cannot be read; a full or broken disk is no fault of a job."""
    text = f"{what}: cannot be read: {error.strerror or error}"
    if isinstance(error, (FileNotFoundError, NotADirectoryError, PermissionError)):
        return MissingDataError(text)
    return UnavailableError(text)
