"""Object stores, which fsspec reads by packages of their own; what goes wrong there, as our errors.

fsspec itself is imported when a store is opened.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from paceline.errors import InvalidError, UnavailableError
from paceline.errors.extras import installing

_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
# Errors that packages of stores pass on and that are no OSError: no credentials, no connection.
_CLIENT_ERRORS = (
    ("botocore.exceptions", "BotoCoreError"),
    ("botocore.exceptions", "ClientError"),
    ("google.auth.exceptions", "GoogleAuthError"),
    ("gcsfs.retry", "HttpError"),
    ("azure.core.exceptions", "AzureError"),
    ("aiohttp", "ClientError"),
)
_MAX_CHARS = 300  # of a message of a package


def package_of(scheme: str) -> str:
    """The distribution that a scheme needs, or words for it."""
    return _PACKAGES.get(scheme, f"the package of {scheme}:// for fsspec")


def installing_store(scheme: str) -> str:
    """The command that installs what a scheme needs, or words for it."""
    package = package_of(scheme)
    if package == "s3fs":
        return installing("s3")
    return f"pip install {package}" if scheme in _PACKAGES else f"install {package}"


def has_credentials(url: str) -> bool:
    """Whether a URL has a user or a password, which all who may read a job would see."""
    return "@" in url.partition("://")[2].partition("/")[0]


def shown(url: str) -> str:
    """The URL without what may be credentials, and not too long."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"[:200]


def filesystem_of(url: str) -> tuple[Any, str]:
    """The filesystem of fsspec for a URL, and the path in it.

    Raises:
        ImportError: the package of the scheme is not installed.
        ValueError: there is no such scheme, or the URL is wrong.
    """
    from fsspec.core import url_to_fs

    filesystem, path = url_to_fs(url)
    return filesystem, str(path)


@contextmanager
def translated(what: str, absent: type[InvalidError]) -> Generator[None]:
    """Raise what packages of stores raise as our errors, which begin with `what`.

    Raises:
        InvalidError: of the type `absent`: it is not there, or may not be read.
        UnavailableError: the store cannot be reached, or refuses the credentials.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise absent(f"{what} does not exist") from None
    except PermissionError:
        raise absent(f"{what} may not be read with the credentials of this installation") from None
    except (OSError, ValueError, *_client_errors()) as error:
        text = " ".join(str(error).split())[:_MAX_CHARS]
        raise UnavailableError(f"{what} cannot be read: {type(error).__name__}: {text}") from None


def _client_errors() -> list[type[Exception]]:
    """Those of the packages that are imported: no other can have raised one."""
    found = [(sys.modules.get(module), name) for module, name in _CLIENT_ERRORS]
    return [getattr(module, name) for module, name in found if hasattr(module, name)]
