"""Scores episodes; stateless."""
