"""What came with a job and its ledger calls: outside of transactions, which wait for nothing."""
