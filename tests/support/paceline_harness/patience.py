"""How long tests wait for what must happen."""

from __future__ import annotations

from typing import TypedDict, TypeVar, Unpack

from paceline.platform.transport import rpc
from paceline.platform.transport.principal import Principal

Request = TypeVar("Request")
Reply = TypeVar("Reply")

PATIENCE_S = 600.0
"""Only ends what hangs: whatever is waited for takes less on a machine ten times slower.

Neither a limit to test against nor a pause: a test waits for an event, with this as its bound.
"""


class CallOptions(TypedDict, total=False):
    """Other arguments of `rpc.call`."""

    idempotent: bool
    on_behalf_of: Principal | None


async def call(
    method: rpc.Unary[Request, Reply],
    request: Request,
    *,
    timeout_s: float = PATIENCE_S,
    **options: Unpack[CallOptions],
) -> Reply:
    """`rpc.call` with this bound, as no test is about how fast an answer comes."""
    return await rpc.call(method, request, timeout_s=timeout_s, **options)
