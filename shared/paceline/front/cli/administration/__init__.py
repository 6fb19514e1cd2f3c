"""Commands of administrators: tokens, the audit log, quotas of tenants."""
