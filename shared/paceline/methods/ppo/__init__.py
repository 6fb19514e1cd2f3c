"""PPO with clipped ratios (arXiv 1707.06347, section 3), optionally with dual clip (1912.09729)."""

from paceline.plugins import Method

METHOD = Method(stage="control", evidence="code")
