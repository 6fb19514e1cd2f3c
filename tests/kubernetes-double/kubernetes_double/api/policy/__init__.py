"""Decisions on requests and objects: access, admission, quotas, deletion."""
