"""OTR: One-Token Rollout (arXiv 2509.26313), supervised training as a policy gradient.

At each token of a demonstration the policy draws tokens from its own distribution; one that equals
the demonstration is rewarded, the others are pushed away a little. Constants are not stated in what
could be read of the paper. The recipe trains the episodes that succeed; rows of experts that are
collected elsewhere train the same way.
"""

from paceline.plugins import Method

METHOD = Method(
    stage="control",
    evidence="reconstructed",
    claim="consistent gains over supervised fine-tuning on mathematics and code (3B, 7B)",
)
