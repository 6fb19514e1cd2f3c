"""Prompt augmentation: a random instruction template for each group (arXiv 2602.03190).

Every group is asked with another of 13 templates, and the reward of the format is that of its
template. The variety keeps the entropy of the policy up, so that it can be trained much longer. The
texts of the templates are ours; a job may name its own. Held-out tasks are always asked with one of
them. Use the reward `template_answer` in place of `exact`: it looks where the template has asked
for the answer. The recipe adds the format to it with weight 1.
"""

from paceline.plugins import Method, Plugin

METHOD = Method(
    stage="generate",
    evidence="code",
    claim="45.2 points on average over mathematical benchmarks with a 1.5B model, still stable "
    "after 60 epochs",
    parts={
        "transforms": {
            "prompt_augmentation": Plugin(
                ".transform:prompt_augmentation", ".templates:PromptAugmentationOptions"
            )
        },
    },
)
