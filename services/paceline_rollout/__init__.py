"""Tokens in, tokens out: one engine, weights swapped in flight."""
