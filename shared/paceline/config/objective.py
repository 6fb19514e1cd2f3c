"""The objective of a job: a pipeline of slots, each a plug-in with its options."""

from __future__ import annotations

from typing import Annotated, Any, cast

from pydantic import Field, model_validator

from paceline.config.base import PluginSpec
from paceline.plugins import StrictModel

MAX_SLOTS = 16
Slots = Annotated[tuple[PluginSpec, ...], Field(max_length=MAX_SLOTS)]


class ObjectiveSpec(StrictModel):
    """The objective that the trainer minimises; slots are called in this order.

    The default is decoupled PPO (AReaL, arXiv 2505.24298): clip around the policy at the start of
    the step, weighted by its ratio to the policy that sampled, without tokens of a ratio above 5.
    """

    proximal: PluginSpec = PluginSpec(kind="batch")
    """Whose log-probs clipping is centred on: `batch` (the weights at the start of the step),
    `behaviour` (the policy that sampled, as the engine computed it), `snapshot` (the same, as the
    trainer does), `interpolated` or `ewma` (the average of the last steps)."""
    shaping: Slots = ()
    """Change advantages with what only the trainer sees, such as entropy."""
    corrections: Slots = (PluginSpec(kind="behaviour_weight"),)
    """Weights of tokens for stale samples and engine mismatch; multiplied."""
    surrogate: PluginSpec = PluginSpec(kind="ppo_clip")
    """The loss of each token."""
    regularisers: Slots = ()
    """Added to the loss of each token."""
    aggregation: PluginSpec = PluginSpec(kind="token_mean")
    """Makes one number of the losses of all tokens."""
    inert: bool | None = None
    """Accept a surrogate that the job names although its ratio is always 1, so that nothing is
    clipped: with the proximal policy `batch` and one mini-batch. Unset: such a job is refused."""

    @model_validator(mode="after")
    def _default_is_inert(self) -> ObjectiveSpec:
        """With the default surrogate and one mini-batch, clipping starts to act with a second."""
        if self.inert is None and "surrogate" not in self.model_fields_set:
            object.__setattr__(self, "inert", True)
        return self

    @model_validator(mode="before")
    @classmethod
    def _of_slots(cls, value: Any) -> Any:
        named = isinstance(value, str) or (isinstance(value, dict) and "kind" in value)
        if named:
            raise ValueError(
                f"an objective has no kind, it is made of slots ({', '.join(cls.model_fields)}); "
                "for example {surrogate: ppo_clip, corrections: [tis]}"
            )
        return cast(Any, value)
