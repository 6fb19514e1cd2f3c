"""Turn-level credit: each turn is compared with all turns of its group by its return to go.

The plain form of what multi-turn methods such as MAPO refine: the reward of the environment at a
turn and later ones, plus that of the episode at its last turn.
"""

from paceline.plugins import Method

METHOD = Method(stage="control", evidence="reconstructed")
