"""Where processes run: on this machine, or as pods.

Decisions: docs/decisions/cluster.md.
"""
