"""Takes batches, steps the optimiser, checkpoints, publishes weights."""
