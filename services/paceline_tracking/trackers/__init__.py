"""Experiment trackers; each imports its library when it is made."""
