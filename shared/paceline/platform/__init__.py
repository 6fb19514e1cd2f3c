"""Processes, files and connections: what services run on. It knows no job."""
