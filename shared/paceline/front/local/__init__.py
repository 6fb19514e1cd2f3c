"""Paceline on one machine: supervisor, embedded store, processes, ports."""
