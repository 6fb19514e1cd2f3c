"""PuzzleCraft: an exploration-aware curriculum of puzzles (arXiv 2512.14944 v2).

Groups of medium difficulty weigh most, and of two groups with equal rewards the one whose answers
are more diverse: there the policy explores instead of repeating one mistake.
"""

from paceline.plugins import Method

METHOD = Method(
    stage="control",
    evidence="notes",
    claim="+2.2 points over GRPO on average with a 7B vision model",
)
