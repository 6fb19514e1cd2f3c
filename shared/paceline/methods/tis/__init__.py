"""Truncated importance sampling between engine and trainer.

The clipped surrogate times min(proximal / behaviour, cap): corrects for tokens that the inference
engine sampled with other numerics or older weights, with bounded variance.
"""

from paceline.plugins import Method

METHOD = Method(
    stage="control",
    evidence="code",
    claim="training with the log-probs of another engine stays stable",
)
