"""DARS: difficulty-adaptive rollout sampling (arXiv 2508.13755).

The advantages of a group add up to most at medium accuracy, so hard prompts train too little. A
second wave of episodes makes up for it. `dars_b` adds breadth: updates of the full batch. As in
the release, prompts without any success get the largest waves; `hopeless_share` bounds them.
"""

from paceline.plugins import Method, Plugin

METHOD = Method(
    stage="generate",
    evidence="code",
    claim="higher pass@k than GRPO without a loss of pass@1",
    parts={"allocators": {"dars": Plugin(".allocator:Dars")}},
)

BREADTH = Method(
    stage="generate",
    evidence="code",
    claim="gains in pass@1 and pass@k at once, with batches of 3072 prompts",
    recipe="recipe_breadth.yaml",
)
