"""Training objectives, one a file; each is found by its entry-point name."""
