"""MSSR: stable single-rollout RL with an entropy-shaped advantage (arXiv 2512.18215).

One rollout for each prompt instead of a group: the baseline is a Beta estimate of the prompt's
success rate that is kept across steps and forgets faster while the policy changes faster. The
shaping `mssr_entropy` guards exploration in the trainer.
"""
