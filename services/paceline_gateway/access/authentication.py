"""Authenticates tokens: asks the experience service and caches its answers for seconds."""

from __future__ import annotations

import hmac
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.config.limits import AccessLimits
from paceline.errors import (
    AuthenticationError,
    BusyError,
    DeadlineError,
    PermissionDeniedError,
    RateError,
    UnavailableError,
)
from paceline.platform import wire
from paceline.platform.transport.principal import Principal, Role, token_digest, token_id_of
from paceline.platform.transport.rpc import call
from paceline.v1 import access_pb2 as pb
from paceline_gateway.access.rates import AccessRates
from paceline_gateway.access.refusals import Refusal, Refusals

if TYPE_CHECKING:
    from paceline.v1.access_pb2_grpc import AuthenticationAsyncStub

# Lifetime of a cached answer, so the delay after which a revocation takes effect.
FRESH_S = 5.0
# Lifetime of a cached answer while the experience service is unavailable.
OUTAGE_S = 60.0
MAX_CACHED = 4096
TIMEOUT_S = 3.0
# Concurrent calls of one token, including event streams.
MAX_OPEN = 200
NEEDED = (
    "a valid API token is needed: Authorization: Bearer TOKEN; "
    "it may be mistyped, revoked or expired"
)
NONE_SENT = (
    "an API token is needed, and none was sent: Authorization: Bearer TOKEN "
    "(paceline commands: PACELINE_TOKEN, --token-file or the installation's --run-dir)"
)


@dataclass(slots=True)
class _CachedAnswer:
    """The last answer about a token; times by the injected clock."""

    who: Principal
    fresh_until: float
    usable_until: float  # during an outage
    expires: float  # the token itself


class Authenticator:
    """Authorizes callers by their token and the role that an action requires."""

    def __init__(
        self,
        *,
        authentication: AuthenticationAsyncStub,
        refusals: Refusals,
        own: Mapping[bytes, Principal],
        timeout_s: float = TIMEOUT_S,
        max_cached: int = MAX_CACHED,
        max_open: int = MAX_OPEN,
        limits: AccessLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`own`: tokens of the installation itself, by digest."""
        self._authentication = authentication
        self._refusals = refusals
        self._own = dict(own)
        self._timeout_s = timeout_s
        self._max_cached = max_cached
        self._clock = clock
        self._max_open = max_open
        self._rates = AccessRates(limits or AccessLimits(), clock=clock)
        self._num_open: Counter[str] = Counter()
        self._cache: OrderedDict[bytes, _CachedAnswer] = OrderedDict()

    async def authorize(
        self, authorization: str, role: Role, *, source: str, action: str
    ) -> Principal:
        """The caller, if they have at least this role.

        Raises:
            AuthenticationError: there is no valid token.
            PermissionDeniedError: its role is too low.
            RateError: there is none that is known to be valid, and too many have failed before.
            UnavailableError: the token cannot be checked at present.
        """
        try:
            known = await self._authenticate(bearer(authorization), source)
            who = replace(known, source=source)
        except RateError:
            self._refusals.note(Refusal(None, source, action, "attempts"))
            raise
        except AuthenticationError:
            reason = "invalid" if authorization else "missing"
            self._refusals.note(Refusal(None, source, action, reason))
            if not authorization:
                raise AuthenticationError(NONE_SENT) from None
            raise
        try:
            who.check_role(role)
        except PermissionDeniedError:
            self._count(who, action)
            self._refusals.note(Refusal(who, source, action, "role"))
            raise
        return who

    @contextmanager
    def track_call(self, who: Principal, action: str) -> Generator[None]:
        """Count a call, and count it as open while inside; own tokens are unlimited.

        Raises:
            RateError: the token makes too many calls.
            BusyError: it has too many open.
        """
        if self._is_own(who):
            yield
            return
        self._count(who, action)
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

    def _is_own(self, who: Principal) -> bool:
        return replace(who, source="") in self._own.values()

    def _count(self, who: Principal, action: str) -> None:
        if self._is_own(who):
            return
        try:
            self._rates.call(who)
        except RateError:
            self._refusals.note(Refusal(who, who.source, action, "calls"))
            raise

    async def _authenticate(self, token: str, source: str) -> Principal:
        digest = token_digest(token)
        # Compares all of them, in constant time.
        matches = [who for own, who in self._own.items() if hmac.compare_digest(own, digest)]
        if token and matches:
            return matches[0]
        cached, now = self._cache.get(digest), self._clock()
        if cached is not None and now < min(cached.fresh_until, cached.expires):
            self._cache.move_to_end(digest)
            return cached.who
        if cached is None:  # failures of others do not keep out one that was valid
            self._rates.check(source)
        try:
            return await self._ask(token_id_of(token), digest)
        except AuthenticationError:
            self._rates.failed(source)
            raise

    async def _ask(self, token_id: str, digest: bytes) -> Principal:
        if not token_id:
            raise AuthenticationError(NEEDED)
        request = pb.AuthenticateRequest(token_id=token_id, digest=digest)
        try:
            reply = await call(
                self._authentication.Authenticate,
                request,
                timeout_s=self._timeout_s,
                idempotent=True,
            )
        except AuthenticationError:
            self._cache.pop(digest, None)
            raise AuthenticationError(NEEDED) from None
        except (UnavailableError, DeadlineError):
            return self._from_cache(digest)
        now = self._clock()
        left_s = reply.expires_in_s if reply.HasField("expires_in_s") else math.inf
        who = wire.from_proto(reply.principal, Principal)
        self._cache[digest] = _CachedAnswer(who, now + FRESH_S, now + OUTAGE_S, now + left_s)
        self._cache.move_to_end(digest)
        while len(self._cache) > self._max_cached:
            self._cache.popitem(last=False)
        return who

    def _from_cache(self, digest: bytes) -> Principal:
        cached, now = self._cache.get(digest), self._clock()
        if cached is None or now >= min(cached.usable_until, cached.expires):
            raise UnavailableError("tokens cannot be checked at the moment; try again") from None
        # So that not every call waits for the timeout.
        cached.fresh_until = min(now + FRESH_S, cached.usable_until)
        return cached.who


def bearer(authorization: str) -> str:
    """The token in the value of an authorization header; empty if there is none."""
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""
