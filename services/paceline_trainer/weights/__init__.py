"""Publication of weights: copied, numbered and served to workers."""
