"""Rarity: tasks that were trained often weigh less (an example, not a published method).

A counter of each task, kept across steps, divides its advantages by the square root of how often
the task was seen; a correction lowers the weight of tokens whose policy has moved on.
"""

from paceline.plugins import Method

METHOD = Method(stage="control", evidence="reconstructed", claim="none; it shows all parts")
