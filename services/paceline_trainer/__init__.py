"""Trains the policy: takes batches, steps the optimiser, checkpoints, publishes weights."""
