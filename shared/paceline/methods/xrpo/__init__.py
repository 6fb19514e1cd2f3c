"""XRPO: novelty-aware sharpening of advantages (arXiv 2510.06672).

Equal credit for all correct answers ignores the novel ones: correct answers that the policy finds
less likely than others of their group get more. It follows another advantage. The planner of
rollouts that the paper adds is not part of it.
"""
