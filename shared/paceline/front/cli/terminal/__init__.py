"""Renders episodes and services for the terminal."""
