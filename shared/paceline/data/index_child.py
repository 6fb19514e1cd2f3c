"""Builds an index in a process of its own: `python -m paceline.data.index_child`.

Files of users are read here and not in a service: a file that takes all memory or breaks the reader
of its format ends this process alone, and reading a million rows holds up nobody.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

from paceline.program import importing, leave

with importing():
    from paceline.beneath import ReadableFolders
    from paceline.data.build import build
    from paceline.data.errors import answer_of, of_os_error
    from paceline.data.remote import fetched
    from paceline.data.shape import RowShape
    from paceline.errors import InvalidError, UnavailableError
    from paceline.parent import end_with_parent


def main() -> None:
    """Read a request from stdin; answer with a line: kind and message of an error, or nothing."""
    end_with_parent()
    request: dict[str, Any] = json.loads(sys.stdin.buffer.read())
    _limit(int(request["memory_bytes"]), int(request["spool_bytes"]))
    print(json.dumps(attempt(request)), flush=True)


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
