"""Sections of the job file, each in a module of its own."""
