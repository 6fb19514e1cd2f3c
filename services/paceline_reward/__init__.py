"""Stateless scoring."""
