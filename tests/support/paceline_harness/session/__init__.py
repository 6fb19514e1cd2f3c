"""How a run of the tests is arranged."""
