"""Lease streams: how workers' slots are shared among the episodes of all jobs."""
