"""One optimiser step: micro-batches, model, optimiser.

Decisions: docs/decisions/training.md.
"""
