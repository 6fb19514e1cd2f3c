"""Code that came with a job and is called by its ledger, in sealed processes."""
