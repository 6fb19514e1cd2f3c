"""Filters and advantages that came with a job: called outside of the ledger's transactions."""
