"""Small files that several processes share: locks, JSON replaced atomically, tails of logs."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import IO, Any

from paceline.errors import StateError

TOKEN_FILE = "token"


@contextlib.contextmanager
def locked(path: Path) -> Generator[None]:
    """Wait for an exclusive lock on a file and hold it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def private_files() -> Generator[None]:
    """Files that this process and its children create inside are readable by the owner only."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def lock_for_life(path: Path, *, what: str) -> IO[str]:
    """Take a lock that the operating system releases when this process ends for any reason.

    Raises:
        StateError: another process holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = path.open("a+")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.seek(0)
        holder = handle.read().strip() or "unknown"
        handle.close()
        raise StateError(f"{what} already runs for {path.parent} (pid {holder})") from None
    handle.truncate(0)
    handle.write(str(os.getpid()))
    handle.flush()
    return handle


def write_json(path: Path, content: object, *, durable: bool = False) -> None:
    """Replace a file atomically: a reader sees either the old or the new content.

    With `durable`, the new content survives a crash of the machine once this returns.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = _draft(path)
    draft.write_text(json.dumps(content, indent=1))
    if durable:
        sync(draft)
    draft.replace(path)
    if durable:
        sync(path.parent)


def discard(path: Path) -> None:
    """Remove a file, and what writers that were killed have left of it."""
    for each in (path, *path.parent.glob(f".{glob.escape(path.name)}.*")):
        each.unlink(missing_ok=True)


def discard_drafts(folder: Path) -> None:
    """Remove what writers on this machine that were killed have left in a folder."""
    for draft in folder.glob(".*.*"):
        writer = draft.suffix.removeprefix(".")
        if writer.isdecimal() and not _runs(int(writer)):
            draft.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def kept_secret(path: Path, make: Callable[[], str]) -> str:
    """The secret in a file readable by the owner only; the first caller creates it.

    Raises:
        OSError: the file can be neither read nor written.
    """
    with contextlib.suppress(FileNotFoundError):
        return path.read_text().strip()
    draft = _secret_draft(path, make())
    try:
        # Unlike a rename, this never replaces a file that another process has just created.
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()
    return path.read_text().strip()


def write_secret(path: Path, secret: str) -> None:
    """Replace a file that only its owner may read.

    Raises:
        OSError: it cannot be written.
    """
    _secret_draft(path, secret).replace(path)


def _secret_draft(path: Path, secret: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = _draft(path)
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as handle:
        handle.write(f"{secret}\n")
        # A crash of the machine must not leave the file without its content.
        handle.flush()
        os.fsync(handle.fileno())
    return draft


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def _draft(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")


def token_of(run_dir: Path) -> str:
    """The bootstrap token in a run directory, created by its gateway; empty if there is none."""
    try:
        return (run_dir / TOKEN_FILE).read_text().strip()
    except OSError:
        return ""


def tail(path: Path, *, num_bytes: int) -> str:
    """The last bytes of a file as text."""
    with path.open("rb") as handle:
        handle.seek(max(0, path.stat().st_size - num_bytes))
        return handle.read().decode(errors="replace")


def read_json(path: Path) -> dict[str, Any] | None:
    """The content of a JSON file; None if it is missing or broken."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
