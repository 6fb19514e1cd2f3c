"""Unpacks wheels, sealed: reads an `UnpackRequest`, writes a `WheelsReply`."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path

from paceline.program import importing, leave

with importing():
    from installer import install
    from installer.destinations import SchemeDictionaryDestination
    from installer.sources import WheelFile

    from paceline.code.wheels.messages import REPLY, UNPACK, LocalWheel, UnpackRequest, WheelsReply
    from paceline.digest import digest_of_file
    from paceline.errors import IntegrityError, PacelineError

_SCHEMES = {"purelib": "", "platlib": "", "data": "", "scripts": "bin", "headers": "include"}


def unpack(request: UnpackRequest) -> WheelsReply:
    """Unpack all wheels into one folder, as `pip install --target` does; later ones win.

    Raises:
        IntegrityError: a wheel has another digest.
    """
    destination = SchemeDictionaryDestination(
        {scheme: str(request.into / folder) for scheme, folder in _SCHEMES.items()},
        interpreter=sys.executable,
        script_kind="posix",
        bytecode_optimization_levels=[0],
        overwrite_existing=True,
    )
    for wheel in request.wheels:
        _check(wheel)
        with WheelFile.open(wheel.path) as source:
            install(source, destination, {})
    return WheelsReply(request.wheels)


def main() -> None:
    """Answer one request."""
    request = UNPACK.validate_json(sys.stdin.buffer.read())
    wheels: list[Path] = [each.path for each in request.wheels]
    try:
        request.hold.apply(readable=wheels, changed=request.into, has_network=False)
        with redirect_stdout(sys.stderr):  # to which files that cannot be compiled are reported
            reply = unpack(request)
    except PacelineError as error:
        reply = WheelsReply(error=error.message)
    sys.stdout.buffer.write(REPLY.dump_json(reply))


def _check(wheel: LocalWheel) -> None:
    with wheel.path.open("rb") as file:
        if digest_of_file(file) != wheel.digest:
            raise IntegrityError(f"{wheel.path.name} has changed since it was fetched")


if __name__ == "__main__":
    main()
    leave(0)
