"""Chooses a rollout worker for each turn, streams its tokens, and fails over when one is lost."""
