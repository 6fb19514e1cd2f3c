"""One optimiser step: micro-batches, model, optimiser."""
