"""Kinds of objects: schemas, defaults, validation, tables."""
