"""The policy's part in episodes: in tokens of rollout workers, or in messages of an endpoint."""
