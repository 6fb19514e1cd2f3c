"""Built-in rewards.

A reward is a function in a module of its own, registered under its name in `pyproject.toml`
(`paceline.rewards`, and `paceline.options.rewards` for its options); see `docs/plugins.md`.
"""
