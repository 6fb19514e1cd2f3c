"""Stored trajectories as users find them, and samples of what would be gone."""
