"""The ledger of one job: admission, leases, groups, batches, evals, completion.

Decisions: docs/decisions/ledger.md.
"""
