"""MSSR: stable single-rollout RL with an entropy-shaped advantage (arXiv 2512.18215).

One rollout for each prompt instead of a group: the baseline is a Beta estimate of the prompt's
success rate that is kept across steps and forgets faster while the policy changes faster. The
shaping `mssr_entropy` guards exploration in the trainer. The recipe is the release: unlike in the
paper, its factor of forgetting rises with the KL to the reference up to the target (`rule`), and
its entropy is that of the sampled token. It begins without the release's pass over all prompts.
"""

from paceline.plugins import Method

METHOD = Method(
    stage="control",
    evidence="code",
    claim="58.6 against 56.3 of GRPO on average (7B), at about half of the steps",
)
