"""RL methods, one folder each; `parts` holds the building blocks that they share.

The `__init__` of a method has its descriptor, `METHOD`, and the models of its options, and imports
neither torch nor numpy. The descriptor is the target of the method's entry point in
`paceline.methods`; see `docs/plugins/recipe.md`.
"""
