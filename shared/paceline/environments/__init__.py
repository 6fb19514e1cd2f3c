"""Built-in environments, each a source of tasks and the world in which they are solved.

An environment is a folder whose `ENVIRONMENT` is registered under its name in `pyproject.toml`
(`paceline.environments`); see `docs/plugins.md`.
"""
