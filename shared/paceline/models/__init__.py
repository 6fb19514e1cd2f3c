"""Where the models of jobs come from: folders, a hub of Hugging Face, object stores.

Decisions: docs/decisions/models-and-checkpoints.md.
"""
