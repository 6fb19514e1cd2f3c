"""Missing old logits in asynchronous agentic RL (arXiv 2605.12070): whom to clip around.

By the time a sample is trained, the trainer's probabilities under the weights that sampled it are
gone, and engine mismatch mixes with staleness. `snapshot` scores each token with the kept weights
of the version that sampled it; tokens whose version is not kept any more, and all tokens with
`interpolated`, get log-probs between those of the engine and of the current policy, by age, which
costs nothing (AReaL's approximation, arXiv 2505.24298). The paper reports `snapshot` as best.

It is exact where a turn has no KV cache of older weights: `rollout.activation: at_boundary`.
`trainer.mismatch.bytes` bounds the memory of kept weights.
"""

from __future__ import annotations

from paceline.plugins import Method, Plugin, StrictModel, declares


@declares(needs=("snapshots",))
class SnapshotOptions(StrictModel):
    """`snapshot` has no options; see `trainer.mismatch.bytes`."""


class InterpolatedOptions(StrictModel):
    """`interpolated` has no options."""


METHOD = Method(
    stage="control",
    evidence="notes",
    claim="66.2 against 64.0 of decoupled PPO on tau2-retail (4B), 69.7 against 65.4 (30B-A3B)",
    parts={"proximals": {"snapshot": Plugin(".proximal:snapshot", SnapshotOptions)}},
)
INTERPOLATED = Method(
    stage="control",
    evidence="code",
    claim="as decoupled PPO, without its additional forward pass",
    recipe="recipe_interpolated.yaml",
    parts={"proximals": {"interpolated": Plugin(".proximal:interpolated", InterpolatedOptions)}},
)
