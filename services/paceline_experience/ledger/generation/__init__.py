"""What is generated: how many episodes, what comes of them, and what plug-ins remember of it.

Decisions: docs/decisions/generation.md.
"""
