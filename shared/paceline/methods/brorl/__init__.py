"""BroRL: scaling RL by broadened exploration (arXiv 2510.01180).

Where more steps no longer help, hundreds of rollouts of each prompt do: what a group has not
sampled is the only part of the update that can lower the mass of correct answers, and it vanishes
as the group grows.
"""

from paceline.plugins import Method

METHOD = Method(
    stage="generate",
    evidence="notes",
    claim="from the plateau of ProRL +1.3 points in maths and +2.2 in code",
)
