"""Environments that Paceline brings."""
