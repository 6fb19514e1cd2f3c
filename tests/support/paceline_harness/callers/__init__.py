"""Servers with every method of their kind, and callers that prove to be of any kind."""
