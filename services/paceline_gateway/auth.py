"""Who may call. Without tokens in the settings everybody may, which is right on one machine."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from fastapi import Request

from paceline.errors import AuthenticationError


class Auth:
    """A FastAPI dependency that wants a known bearer token."""

    def __init__(self, tokens: Iterable[str] = ()) -> None:
        self._expected = [f"Bearer {token}".encode() for token in tokens]

    async def __call__(self, request: Request) -> None:
        """Raise `AuthenticationError` unless the request may pass."""
        given = request.headers.get("authorization", "").encode()
        known = [hmac.compare_digest(given, expected) for expected in self._expected]
        if self._expected and not any(known):
            raise AuthenticationError("a valid bearer token is needed: Authorization: Bearer ...")
