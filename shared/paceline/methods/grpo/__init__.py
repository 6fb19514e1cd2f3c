"""GRPO: DeepSeekMath (arXiv 2402.03300, section 4.1).

The reward of each answer is normalised over the group of answers to the same question, instead of
using a learned critic; each answer has the same weight in the loss.
"""

from paceline.plugins import Method

METHOD = Method(stage="control", evidence="code", claim="51.7 % on MATH after RL of a 7B model")
