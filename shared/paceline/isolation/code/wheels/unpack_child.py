"""Unpacks wheels, sealed: handles an `UnpackRequest` with a `WheelsReply`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from paceline.platform.program import importing, leave

with importing():
    from installer import install
    from installer.destinations import SchemeDictionaryDestination
    from installer.sources import WheelFile

    from paceline.errors import IntegrityError
    from paceline.isolation.child import ServedCall, serve
    from paceline.isolation.code.wheels.messages import (
        HANDLE,
        MOST_ANSWER_BYTES,
        REPLY,
        UNPACK,
        LocalWheel,
        UnpackRequest,
        WheelsReply,
    )
    from paceline.platform.digest import digest_of_file

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
    """Serve one request."""
    serve({HANDLE: _handle}, most_bytes=MOST_ANSWER_BYTES)


def _handle(call: ServedCall) -> dict[str, Any]:
    request = UNPACK.validate_python(call.fields["request"])
    wheels: list[Path] = [each.path for each in request.wheels]
    request.hold.apply(readable=wheels, changed=request.into, has_network=False)
    return REPLY.dump_python(unpack(request), mode="json")


def _check(wheel: LocalWheel) -> None:
    with wheel.path.open("rb") as file:
        if digest_of_file(file) != wheel.digest:
            raise IntegrityError(f"{wheel.path.name} has changed since it was fetched")


if __name__ == "__main__":
    main()
    leave(0)
