"""A simulated job that the controller's decisions size."""
