"""One plug-in of each kind for Paceline, to be copied."""
