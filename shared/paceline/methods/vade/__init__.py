"""VADE: variance-aware dynamic sampling by online difficulty estimation (arXiv 2511.18902).

Each task has a Beta posterior of its success rate, which fades as the policy changes. Tasks are
drawn by Thompson sampling where a group is expected to tell most: hard but possible ones, whose
rewards differ. No extra rollouts are needed to know them.
"""

from paceline.plugins import Method, Plugin

METHOD = Method(
    stage="generate",
    evidence="reconstructed",
    claim="the reward of uniform sampling with about a third of the rollouts",
    parts={"samplers": {"vade": Plugin(".sampler:Vade")}},
)
