"""Paceline: asynchronous RL post-training for LLM agents, as independent services."""

__version__ = "0.1.0"
