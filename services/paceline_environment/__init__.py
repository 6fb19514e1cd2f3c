"""Runs episodes: environment, policy and reward, one asyncio task each.

Decisions: docs/decisions/episodes.md.
"""
