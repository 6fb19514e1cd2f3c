"""Reads the `requirements.txt` of a job's code: names and versions of packages, nothing else.

What pip would also take, such as addresses, paths, other files and options, says where packages
come from, which is the operator's choice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from packaging.markers import UndefinedEnvironmentName
from packaging.requirements import Requirement

from paceline.errors import InvalidError

REQUIREMENTS = "requirements.txt"
WHEELS = "wheels"
MAX_REQUIREMENTS = 100
MAX_BYTES = 64 << 10
_COMMENT = re.compile(r"(^|\s)#.*$")
_HASH = re.compile(r"\s--hash=(sha(?:256|384|512):[0-9a-f]{64,128})(?=\s|$)")
_SHOWN = 80


def parse(content: bytes) -> tuple[str, ...]:
    """The requirements, one per line of a file for pip.

    Raises:
        InvalidError: a line is none; says which and why.
    """
    if len(content) > MAX_BYTES:
        raise InvalidError(f"{REQUIREMENTS}: {len(content)} bytes; at most {MAX_BYTES} are allowed")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise InvalidError(f"{REQUIREMENTS}: not UTF-8: {error.reason}") from None
    found = tuple(_requirement(number, line) for number, line in _lines(text))
    if len(found) > MAX_REQUIREMENTS:
        raise InvalidError(
            f"{REQUIREMENTS}: {len(found)} requirements; at most {MAX_REQUIREMENTS} are allowed"
        )
    return found


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines with something in them and their numbers; a backslash joins it with the next."""
    joined, start = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        start = start or number
        joined += _COMMENT.sub("", line)
        if line.endswith("\\"):
            joined = joined.removesuffix("\\") + " "
            continue
        if joined.strip():
            yield start, joined.strip()
        joined, start = "", 0
    if joined.strip():
        yield start, joined.strip()


def _requirement(number: int, line: str) -> str:
    hashes = _HASH.findall(line)
    text = _HASH.sub("", line).strip()
    if why := _refused(text):
        raise _invalid(number, line, why)
    try:
        parsed = Requirement(text)
        # Else only the resolver would find that versions or a marker make no sense.
        parsed.specifier.contains("0")
        if parsed.marker is not None:
            parsed.marker.evaluate({"extra": ""})
    except (ValueError, UndefinedEnvironmentName) as error:  # or a number of 5000 digits
        raise _invalid(number, line, str(error).partition("\n")[0][:_SHOWN]) from None
    if parsed.url:
        raise _invalid(number, line, "addresses are not allowed; packages come from the index")
    return " ".join([str(parsed), *(f"--hash={each}" for each in hashes)])


def _refused(text: str) -> str:
    """Why a line is no name with versions; empty: it may be one."""
    if text.startswith("-") or " --" in text:
        return "options are not allowed; the index is the choice of the installation"
    if "$" in text:
        return "variables are not allowed"
    if "://" in text or text.startswith((".", "/", "~")) or text.endswith((".whl", ".gz", ".zip")):
        return (
            "addresses and paths are not allowed; name the package, and put wheels of "
            f"your own into the folder {WHEELS}"
        )
    return ""


def _invalid(number: int, line: str, why: str) -> InvalidError:
    return InvalidError(f"{REQUIREMENTS}: line {number}: {line[:_SHOWN]!r}: {why}")
