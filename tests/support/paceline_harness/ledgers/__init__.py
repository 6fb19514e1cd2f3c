"""Ledgers and jobs on a real store, with a clock that tests set."""
