"""Resource kinds: schemas, defaults, validation, tables."""
