"""BAPO: adaptive clip bounds (arXiv 2510.18927, algorithm 1).

Off-policy batches are dominated by tokens of negative advantage, and fixed symmetric bounds block
positive tokens of low probability, so entropy collapses. BAPO raises the bounds of each update,
step by step, until the positive tokens contribute a given share of the loss.

`measure: surrogate` is the paper's. A clipped negative token counts with a larger value there than
an unclipped one, so that raising the lower bound moves the share away from its target; `gradient`
counts tokens that carry a gradient, with which both moves lead to the target.
"""

from paceline.plugins import Method

METHOD = Method(
    stage="control", evidence="notes", claim="87.1 % on AIME 2024 with 32B, 70.8 % with 7B"
)
