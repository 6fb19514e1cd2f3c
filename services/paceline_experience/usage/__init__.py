"""Usage of tenants, compared with their quotas."""
