"""Whose token it is: asked of the experience service, remembered for some seconds."""

from __future__ import annotations

import hmac
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.access import Principal, Role, digest_of, from_message, token_id_of
from paceline.errors import (
    AuthenticationError,
    BusyError,
    DeadlineError,
    PermissionDeniedError,
    UnavailableError,
)
from paceline.rpc import call
from paceline.v1 import access_pb2 as pb
from paceline_gateway.refusals import Refusal, Refusals

if TYPE_CHECKING:
    from paceline.v1.access_pb2_grpc import GatekeeperAsyncStub

# A revoked token opens nothing after so long.
FRESH_S = 5.0
# While the experience service cannot be asked, what it said before counts for so long.
OUTAGE_S = 60.0
MOST_KNOWN = 4096
TIMEOUT_S = 3.0
# Calls of one token at once, streams of events among them.
MAX_OPEN = 200
NEEDED = (
    "a valid API token is needed: Authorization: Bearer TOKEN; "
    "it may be mistyped, revoked or expired"
)


@dataclass(slots=True)
class _Known:
    """What was last said about a token; times of the injected clock."""

    who: Principal
    fresh_until: float
    holds_until: float  # in an outage
    ends: float  # when it expires


class Door:
    """Lets in who has a token that allows what is asked for."""

    def __init__(
        self,
        *,
        gatekeeper: GatekeeperAsyncStub,
        refusals: Refusals,
        own: Mapping[bytes, Principal],
        timeout_s: float = TIMEOUT_S,
        most_known: int = MOST_KNOWN,
        max_open: int = MAX_OPEN,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`own`: tokens of the installation itself by their digests."""
        self._gatekeeper = gatekeeper
        self._refusals = refusals
        self._own = dict(own)
        self._timeout_s = timeout_s
        self._most_known = most_known
        self._clock = clock
        self._max_open = max_open
        self._num_open: Counter[str] = Counter()
        self._known: OrderedDict[bytes, _Known] = OrderedDict()

    async def enter(
        self, authorization: str, least: Role, *, source: str, action: str
    ) -> Principal:
        """Who calls, if they may do what needs `least`.

        Raises:
            AuthenticationError: there is no valid token.
            PermissionDeniedError: its role is too small.
            UnavailableError: the token cannot be checked at the moment.
        """
        try:
            who = replace(await self._who(bearer(authorization)), source=source)
        except AuthenticationError:
            reason = "invalid" if authorization else "missing"
            self._refusals.note(Refusal(None, source, action, reason))
            raise
        try:
            who.check_role(least)
        except PermissionDeniedError:
            self._refusals.note(Refusal(who, source, action, "role"))
            raise
        return who

    @contextmanager
    def open(self, who: Principal) -> Generator[None]:
        """Inside, one of their calls is open.

        Raises:
            BusyError: they have too many; the installation itself may have any number.
        """
        if replace(who, source="") in self._own.values():
            yield
            return
        if self._num_open[who.token_id] >= self._max_open:
            raise BusyError(
                f"this token has {self._max_open} calls open; wait for some of them to end"
            )
        self._num_open[who.token_id] += 1
        try:
            yield
        finally:
            self._num_open[who.token_id] -= 1
            if not self._num_open[who.token_id]:
                del self._num_open[who.token_id]

    async def _who(self, token: str) -> Principal:
        if not token:
            raise AuthenticationError(NEEDED)
        digest = digest_of(token)
        # All of them are compared: how long it takes says nothing.
        fits = [who for own, who in self._own.items() if hmac.compare_digest(own, digest)]
        if fits:
            return fits[0]
        token_id = token_id_of(token)
        if not token_id:
            raise AuthenticationError(NEEDED)
        known, now = self._known.get(digest), self._clock()
        if known is not None and now < min(known.fresh_until, known.ends):
            self._known.move_to_end(digest)
            return known.who
        return await self._ask(token_id, digest)

    async def _ask(self, token_id: str, digest: bytes) -> Principal:
        request = pb.AuthenticateRequest(token_id=token_id, digest=digest)
        try:
            reply = await call(
                self._gatekeeper.Authenticate, request, timeout_s=self._timeout_s, idempotent=True
            )
        except AuthenticationError:
            self._known.pop(digest, None)
            raise AuthenticationError(NEEDED) from None
        except (UnavailableError, DeadlineError):
            return self._as_before(digest)
        now = self._clock()
        left_s = reply.expires_in_s if reply.HasField("expires_in_s") else math.inf
        who = from_message(reply.principal)
        self._known[digest] = _Known(who, now + FRESH_S, now + OUTAGE_S, now + left_s)
        self._known.move_to_end(digest)
        while len(self._known) > self._most_known:
            self._known.popitem(last=False)
        return who

    def _as_before(self, digest: bytes) -> Principal:
        known, now = self._known.get(digest), self._clock()
        if known is None or now >= min(known.holds_until, known.ends):
            raise UnavailableError("tokens cannot be checked at the moment; try again") from None
        known.fresh_until = now + FRESH_S  # so that not every call waits for the time limit
        return known.who


def bearer(authorization: str) -> str:
    """The token in the value of an authorization header; empty if there is none."""
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""
