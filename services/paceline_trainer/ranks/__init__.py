"""Ranks: start of a process, its rank, collectives."""
