"""Serves one inference engine: tokens in, tokens out, weights swapped in flight."""
