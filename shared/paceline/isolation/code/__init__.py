"""Code that travels with a job: a folder is packed at submit and unpacked where it runs.

Decisions: docs/decisions/isolation.md.
"""
