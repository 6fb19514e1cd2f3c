"""MAPO, later MICA: multi-turn advantages for subjective dialogue (arXiv 2603.06194).

Without a single terminal reward, each turn is compared with the same turn of the other episodes of
its group, and with all turns of the group.
"""

from paceline.plugins import Method

METHOD = Method(
    stage="control", evidence="notes", claim="+15 to +43 points on an empathy benchmark (7B to 32B)"
)
