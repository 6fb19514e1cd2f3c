"""DART: decoupled agentic RL training for GUI agents (arXiv 2509.23866).

Of its parts, the trim: groups are sampled larger than what trains, and what is kept of each has at
least one success and one failure.
"""

from paceline.plugins import Method

METHOD = Method(
    stage="control",
    evidence="code",
    claim="42.1 % on OSWorld-Verified, +14.6 over the base model, with its scheduling of rollouts",
)
