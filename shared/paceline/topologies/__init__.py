"""Built-in topologies, which drive an episode: the order of turns and the resulting transcripts.

A topology is a coroutine function in a module of its own, registered under its name in
`pyproject.toml` (`paceline.topologies`, and `paceline.options.topologies` for its options); see
`docs/plugins.md`.
"""
