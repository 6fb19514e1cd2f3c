"""Finds what a server has not loaded: SGLang skips tensors whose names it does not know."""

from __future__ import annotations

from paceline.errors import InvalidError, MisfitError, NotFoundError
from paceline.telemetry.logs import Log
from paceline_rollout.engines.sglang.api import SglangClient

# A server computes its other tensors, such as tables of positions, by itself.
_LOADED = ("weight", "bias")
_SHOWN = 4
log = Log("sglang")
Checksums = list[dict[str, str]]  # of each rank, by SGLang's names


class FirstLoad:
    """The proof that a server has replaced all of the dummy weights that it starts with.

    Later loads have the same names, and the bytes of some tensors may not have changed, so only the
    first one of a server proves anything.
    """

    def __init__(self, client: SglangClient) -> None:
        self._client = client
        self._dummies: Checksums | None = None

    async def begin(self) -> None:
        """Call it before a load."""
        if self._dummies is None:
            self._dummies = await self._checksums()

    async def check(self) -> None:
        """Call it after a load that has succeeded.

        Raises:
            MisfitError: the server still has some of the weights that it started with.
        """
        kept = kept_tensors(self._dummies or [], await self._checksums())
        if kept:
            names = ", ".join(kept[:_SHOWN]) + (", ..." if len(kept) > _SHOWN else "")
            raise MisfitError(
                f"sglang: the server has not loaded {len(kept)} of its tensors, as its loader "
                f"skips names that it does not know: {names}; use another release of SGLang, or "
                "another engine"
            )

    async def _checksums(self) -> Checksums:
        """None at all from a release without them."""
        try:
            return await self._client.checksums()
        except (NotFoundError, InvalidError) as error:
            log.warning("what the server loads cannot be checked", error=error)
            return []


def kept_tensors(before: Checksums, after: Checksums) -> list[str]:
    """The tensors that are the same on a rank, sorted."""
    return sorted(
        {
            name
            for old, new in zip(before, after, strict=False)
            for name, checksum in old.items()
            if name.endswith(_LOADED) and new.get(name) == checksum
        }
    )
