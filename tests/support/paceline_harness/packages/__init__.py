"""Wheels, and an index that serves them, for tests of what code of jobs requires."""
