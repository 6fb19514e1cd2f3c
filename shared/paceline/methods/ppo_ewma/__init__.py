"""PPO-EWMA (arXiv 2110.00641), with resets as in Missing Old Logits (arXiv 2605.12070).

Clips around an average of the weights of the last steps, which stands for the policies that sampled
a stale batch. It costs one copy of the weights in float32 and a forward pass, and starts again from
the present weights if too few tokens were active in a step.
"""

from paceline.plugins import Method

METHOD = Method(
    stage="control",
    evidence="notes",
    claim="65.7 against 64.0 of decoupled PPO on tau2-retail (4B), 67.8 against 65.4 (30B-A3B)",
)
