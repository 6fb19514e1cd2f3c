"""Transports of weights for tests of those who use them."""

from __future__ import annotations

from paceline.errors import IntegrityError
from paceline.weights import HttpTransport, Staging, TransportSettings


class Forgetful(HttpTransport):
    """Finds the first snapshot that it verifies damaged."""

    def __init__(self, settings: TransportSettings) -> None:
        super().__init__(settings)
        self._asked = False

    def verify(self, staging: Staging) -> None:
        asked, self._asked = self._asked, True
        if not asked:
            raise IntegrityError("chunk 0 differs from its digest")
        super().verify(staging)
