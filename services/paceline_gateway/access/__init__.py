"""Authentication and authorization: tokens, required roles, and refusals.

Decisions: docs/decisions/access.md.
"""
