"""MC-GRPO: median-centered group relative policy optimization (arXiv 2601.22582).

With few rollouts the mean flips the signs of advantages. The baseline is the median, which is one
of the samples and is not trained: `experience.group_size` is one more than the episodes that train.
"""

from paceline.plugins import Method

METHOD = Method(
    stage="control",
    evidence="code",
    claim="groups of 2 within 1 % of groups of 8; +4.6 on GSM8K with groups of 2",
)
