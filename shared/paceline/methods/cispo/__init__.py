"""CISPO: MiniMax-M1 (arXiv 2506.13585, section 3.1).

PPO clipping removes the gradient of rare but decisive tokens. CISPO clips the importance weight
instead, without gradient, so that every token keeps one. The paper tunes only the upper bound and
does not state it; verl's example has 0.2, other code has caps of 4 to 5.
"""

from paceline.plugins import Method

METHOD = Method(
    stage="control",
    evidence="code",
    claim="the accuracy of DAPO on AIME 2024 in half of the steps (32B)",
)
