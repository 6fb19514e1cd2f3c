"""Snippets of the documentation, and how they are run."""
