"""Tenants: quotas, usage, API tokens, and the audit log."""
