"""PPO with clipped ratios (arXiv 1707.06347, section 3), optionally with dual clip (1912.09729)."""

from __future__ import annotations

from pydantic import Field

from paceline.methods.parts import ClipOptions
from paceline.plugins import Method, Plugin


class PpoClipOptions(ClipOptions):
    """Options of `ppo_clip`."""

    dual_clip: float | None = Field(default=None, gt=1.0)
    """Bound of the loss where the advantage is negative, in multiples of it; null: none."""


METHOD = Method(
    stage="control",
    evidence="code",
    parts={"surrogates": {"ppo_clip": Plugin(".surrogate:ppo_clip", PpoClipOptions)}},
)
