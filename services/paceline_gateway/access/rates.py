"""How often tokens may be tried and used: token buckets, of bounded number, in memory."""

from __future__ import annotations

import ipaddress
import math
from collections import OrderedDict
from collections.abc import Callable

from paceline.config.limits import AccessLimits
from paceline.errors import RateError
from paceline.platform.transport.principal import Principal

# Buckets of addresses and of tokens kept at most, so that addresses made up fill no memory.
MAX_KEYS = 16_384
# The part of an IPv6 address that one customer of a network usually controls.
_IPV6_PREFIX = 64


class Buckets:
    """A token bucket for each key: `burst` at once, then `per_s` a second.

    Of more than `max_keys`, the one that was used least recently is forgotten, and full again.
    """

    def __init__(
        self,
        *,
        per_s: float,
        burst: int,
        clock: Callable[[], float],
        max_keys: int = MAX_KEYS,
    ) -> None:
        self._per_s = per_s
        self._burst = burst
        self._clock = clock
        self._max_keys = max_keys
        # Generic cell rate: when a bucket will be full again, least recently used first.
        self._full_at: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._full_at)

    def used(self, key: str) -> bool:
        """Whether something has been taken from this bucket that has not come back yet."""
        return self._full_at.get(key, -math.inf) > self._clock()

    def wait_s(self, key: str) -> float:
        """Seconds until one can be taken; 0: at once."""
        now = self._clock()
        full_at = max(self._full_at.get(key, now), now)
        return max(0.0, full_at - now - (self._burst - 1) / self._per_s)

    def take(self, key: str) -> None:
        """Take one, on credit if none is left."""
        now = self._clock()
        self._full_at[key] = max(self._full_at.get(key, now), now) + 1 / self._per_s
        self._full_at.move_to_end(key)
        while len(self._full_at) > self._max_keys:
            self._full_at.popitem(last=False)


class AccessRates:
    """Limits attempts with tokens that turn out to be invalid, and calls of each token.

    The limit in all refuses only addresses that have failed lately: others cannot be kept out.
    """

    def __init__(
        self, limits: AccessLimits, *, clock: Callable[[], float], max_keys: int = MAX_KEYS
    ) -> None:
        self._limits = limits
        self._failed = Buckets(
            per_s=limits.failed_per_s,
            burst=limits.failed_burst,
            clock=clock,
            max_keys=max_keys,
        )
        self._all_failed = Buckets(
            per_s=limits.all_failed_per_s, burst=limits.all_failed_burst, clock=clock
        )
        self._calls = Buckets(
            per_s=limits.calls_per_s, burst=limits.calls_burst, clock=clock, max_keys=max_keys
        )

    @property
    def num_addresses(self) -> int:
        """Addresses that have failed and are remembered."""
        return len(self._failed)

    def check(self, source: str) -> None:
        """Whether to try a token that is not known to be valid.

        Raises:
            RateError: too many from this address were invalid, or in all.
        """
        address = network_of(source)
        wait_s = self._failed.wait_s(address)
        if self._failed.used(address):
            wait_s = max(wait_s, self._all_failed.wait_s(""))
        if wait_s > 0:
            raise RateError(
                f"too many calls without a valid token came from {source}; the next one is "
                f"answered in {_seconds(wait_s)} (limits.access.failed_per_s)",
                wait_s,
            )

    def failed(self, source: str) -> None:
        """Count a token that was tried and is invalid."""
        self._failed.take(network_of(source))
        self._all_failed.take("")

    def call(self, who: Principal) -> None:
        """Count a call of a token.

        Raises:
            RateError: it calls too often.
        """
        if wait_s := self._calls.wait_s(who.token_id):
            raise RateError(
                f"this token makes more than {self._limits.calls_per_s:g} calls a second; the next "
                f"one is answered in {_seconds(wait_s)} (limits.access.calls_per_s)",
                wait_s,
            )
        self._calls.take(who.token_id)


def network_of(source: str) -> str:
    """The address that attempts are counted for: that of the peer, or its network for IPv6."""
    try:
        address = ipaddress.ip_address(source.partition("%")[0])
    except ValueError:  # a socket of this machine
        return source
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, _IPV6_PREFIX), strict=False))


def _seconds(wait_s: float) -> str:
    return f"{math.ceil(wait_s)} s"
