"""Built-in replays, which store episodes and add them to later groups of their task.

A replay is a class in a module of its own, registered under its name in `pyproject.toml`
(`paceline.replays`); see `docs/plugins.md`.
"""
