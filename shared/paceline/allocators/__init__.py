"""Built-in allocators, which decide how many episodes a task gets.

An allocator is a class in a module of its own, registered under its name in `pyproject.toml`
(`paceline.allocators`); see `docs/plugins.md`.
"""
