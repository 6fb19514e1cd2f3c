"""UI-S1: semi-online reinforcement learning for GUI agents (arXiv 2509.11543).

The advantage of a turn adds a comparison of its discounted return with the same turn of the group
and one of the episode. The release compares the turn's own score where the paper compares the
return of the whole episode.
"""

from paceline.plugins import Method

METHOD = Method(
    stage="control",
    evidence="code",
    claim="+12.0 on AndroidWorld and +23.8 on AITW over the 7B base model",
)
