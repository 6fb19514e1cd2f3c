"""The ledger of what was asked, made, scored and trained; the only one that touches Redis."""
