"""Lists the slowest tests with what they wait for: `make slowest-tests`."""
