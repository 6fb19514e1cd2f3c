"""DAPO: an open-source LLM RL system at scale (arXiv 2503.14476, section 3).

GRPO with four switches: clip-higher lets unlikely tokens grow, the mean over tokens weighs long
answers by their length, groups without variance are replaced by others (dynamic sampling), and a
soft penalty precedes the length limit. To filter answers that are cut off instead of penalising
them, set `sampling.on_truncation: mask`.
"""

from paceline.plugins import Method

METHOD = Method(
    stage="control",
    evidence="code",
    claim="50 points on AIME 2024 with Qwen2.5-32B, in half of the steps of R1-Zero",
)
