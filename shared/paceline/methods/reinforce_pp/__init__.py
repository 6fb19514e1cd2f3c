"""REINFORCE++: a simple and efficient approach for aligning LLMs (arXiv 2501.03262).

Normalises over all tokens of the batch instead of the group, so it also works with groups of one;
normalising each prompt alone overfits easy and hard ones. The baseline variant subtracts the
group's mean first.
"""

from paceline.plugins import Method

METHOD = Method(
    stage="control",
    evidence="code",
    claim="as stable as PPO without a critic, also with groups of one",
)

BASELINE = Method(
    stage="control",
    evidence="code",
    claim="as reinforce_pp, for groups with sparse rewards",
    recipe="recipe_baseline.yaml",
)
