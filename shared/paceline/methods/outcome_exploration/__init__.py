"""Outcome-based exploration (arXiv 2509.06941): bonuses for answers that are rare.

RL collapses the diversity of final answers, even of prompts that are not solved. Historical bonuses
count the answers of a prompt across steps; the batch bonus compares the answers of a group. It
follows another advantage. The paper excludes the tokens of the answer itself; here all tokens get
the bonus.
"""
