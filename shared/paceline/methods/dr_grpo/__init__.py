"""Dr. GRPO: Understanding R1-Zero-Like Training (arXiv 2503.20783, section 3).

GRPO without division by the group's standard deviation, which overweights questions that are too
easy or too hard.
"""

from __future__ import annotations

from paceline.plugins import Method, Plugin, StrictModel, declares


@declares(needs=("group>=2",))
class DrGrpoOptions(StrictModel):
    """`dr_grpo` has no options."""


METHOD = Method(
    stage="control",
    evidence="code",
    claim="43.3 % on AIME 2024 with a 7B base model and shorter wrong answers",
    parts={"advantages": {"dr_grpo": Plugin(".advantage:dr_grpo", DrGrpoOptions)}},
)
