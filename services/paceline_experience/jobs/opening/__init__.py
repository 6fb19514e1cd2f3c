"""Opens the ledgers of jobs, with the code that came with them."""
