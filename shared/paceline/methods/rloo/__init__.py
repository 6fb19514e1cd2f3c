"""RLOO: Back to Basics (arXiv 2402.14740, section 3).

The baseline of each reward is the mean of the other rewards in its group, which is unbiased.
"""
