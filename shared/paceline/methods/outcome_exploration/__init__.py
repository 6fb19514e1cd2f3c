"""Outcome-based exploration (arXiv 2509.06941): bonuses for answers that are rare.

RL collapses the diversity of final answers, even of prompts that are not solved. Historical bonuses
count the answers of a prompt across steps; the batch bonus compares the answers of a group. It
follows another advantage. The paper excludes the tokens of the answer itself; here all tokens get
the bonus.
"""

from paceline.plugins import Method

METHOD = Method(
    stage="control",
    evidence="notes",
    claim="more distinct answers of 8 (2.88 to 2.93, batch bonus 3.23) at better pass@k",
)
