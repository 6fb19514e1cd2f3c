"""Which installation, or which run directory, a command is about."""
