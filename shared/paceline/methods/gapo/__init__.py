"""GAPO: group adaptive policy optimization for code editing (arXiv 2510.21830).

Noisy outliers of execution-based rewards shift the mean; the baseline is the median of the densest
interval of the group's rewards instead. With as many successes as failures the lower cluster wins,
so failures get no gradient then.
"""

from paceline.plugins import Method

METHOD = Method(
    stage="control",
    evidence="code",
    claim="up to +4.4 points of exact match over GRPO and DAPO in code editing",
)
