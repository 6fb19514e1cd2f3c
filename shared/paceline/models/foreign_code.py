"""The boundary to the code of a model's family, which may raise anything."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from paceline.errors import InvalidError, PacelineError

_BLAMELESS = (MemoryError, PermissionError)  # of models: the machine, or a seal


@contextmanager
def of_model(what: str, *, unless: tuple[type[Exception], ...] = ()) -> Generator[None]:
    """Name in one line what was raised within.

    Raises:
        InvalidError: `what`, with the error that it was; those of `unless`, our own, and what no
            model is to blame for stay.
    """
    try:
        yield
    except (PacelineError, *_BLAMELESS, *unless):
        raise
    except Exception as error:  # the supervisor boundary of a model's code
        cause = error.__cause__ or error
        said = f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0]}"
        raise InvalidError(f"{what} ({said})") from error
