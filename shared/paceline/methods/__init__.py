"""RL methods, one folder each; `parts` holds the building blocks that they share.

A method is an advantage estimator, an objective, or both, each with an options model that imports
no torch. They are registered under their names in `pyproject.toml` (`paceline.advantages`,
`paceline.objectives`, and `paceline.options.*` for the options); see `docs/plugins.md`.
"""
