"""Stored episodes that join later groups as guests."""
