"""Builds an index in a process of its own.

Files of users are read here and not in a service: a file that takes all memory or breaks the reader
of its format ends this process alone, and reading a million rows holds up nobody.
"""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

from paceline.platform.program import importing, leave

with importing():
    from paceline.data.build import build
    from paceline.data.errors import answer_of, of_os_error
    from paceline.data.remote import fetched
    from paceline.data.shape import RowShape
    from paceline.errors import InvalidError, UnavailableError
    from paceline.isolation.child import ServedCall, serve
    from paceline.platform.beneath import ReadableFolders
    from paceline.platform.parent import end_with_parent


def main() -> None:
    """Serve `index`."""
    end_with_parent()
    serve({"index": _index})


def _index(call: ServedCall) -> dict[str, list[str]]:
    """Kind and message of an error, or nothing."""
    _limit(int(call.fields["memory_bytes"]), int(call.fields["spool_bytes"]))
    return {"wrong": attempt(call.fields)}


def attempt(request: dict[str, Any]) -> list[str]:
    """See `answer_of`; empty: the index of the source is written."""
    into, spool_bytes = Path(request["into"]), int(request["spool_bytes"])
    try:
        path, folders = request["path"], ReadableFolders(**request["folders"])
        if "://" in path:
            path = fetched(path, into, most_bytes=spool_bytes)
            folders = ReadableFolders((str(into),), shared=False)
        shape = RowShape.model_validate(request["shape"])
        source = Path(path), request["name"]
        build(*source, shape, into, folders=folders, spool_bytes=spool_bytes)
    except (InvalidError, UnavailableError) as error:
        return answer_of(error)
    except OSError as error:
        return answer_of(of_os_error(request["name"], error))
    except MemoryError:
        text = f"{request['name']}: needs more than {request['memory_bytes']} bytes to be read"
        return answer_of(InvalidError(text))
    return []


def _limit(memory_bytes: int, spool_bytes: int) -> None:
    """Limit address space and the size of files."""
    for kind, wanted in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, 2 * spool_bytes + (1 << 30)),
    ):
        hard = resource.getrlimit(kind)[1]
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(kind, (most, hard))


if __name__ == "__main__":
    main()
    leave(0)
