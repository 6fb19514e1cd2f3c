"""Dr. GRPO: Understanding R1-Zero-Like Training (arXiv 2503.20783, section 3).

GRPO without division by the group's standard deviation, which overweights questions that are too
easy or too hard.
"""

from paceline.plugins import Method

METHOD = Method(
    stage="control",
    evidence="code",
    claim="43.3 % on AIME 2024 with a 7B base model and shorter wrong answers",
)
