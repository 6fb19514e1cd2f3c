"""Built-in samplers, which decide the order of tasks.

A sampler is a class in a module of its own, registered under its name in `pyproject.toml`
(`paceline.samplers`); see `docs/plugins.md`.
"""
