"""Filters: whether a finished group is worth training on."""
