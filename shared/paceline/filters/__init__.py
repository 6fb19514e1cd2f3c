"""Built-in filters, which decide whether a finished group is trained on, and which of its episodes.

A filter is a function in a module of its own, registered under its name in `pyproject.toml`
(`paceline.filters`, and `paceline.options.filters` for its options); see `docs/plugins.md`.
"""
