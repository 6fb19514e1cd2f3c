"""Keys where there are no certificates: `python -m paceline.platform.server.issue_keys FOLDER`.

Writes `FOLDER/KIND/keys.json` for every kind of service, from `FOLDER/secret`, which is created if
there is none and which no service needs. To replace all keys, delete it and run this again.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from pathlib import Path

from paceline.enums import WorkerKind
from paceline.platform.files import private_files
from paceline.platform.transport.service_keys import issue


def main(arguments: list[str]) -> int:
    """Write the files; returns the exit code."""
    parser = ArgumentParser(prog="python -m paceline.platform.server.issue_keys")
    parser.add_argument("folder", type=Path, help="where the files are written")
    folder: Path = parser.parse_args(arguments).folder
    try:
        with private_files():
            issue(folder, WorkerKind)
    except OSError as error:
        print(f"{error.filename or folder}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
