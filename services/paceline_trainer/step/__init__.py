"""One optimiser step: micro-batches, model, optimiser, mismatch with the engine."""
