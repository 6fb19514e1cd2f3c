"""A model behind an outside endpoint: its requests, and what it answers."""
