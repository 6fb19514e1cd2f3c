"""Dr. GRPO: Understanding R1-Zero-Like Training (arXiv 2503.20783, section 3).

GRPO without division by the group's standard deviation, which overweights questions that are too
easy or too hard.
"""
