"""Which processes jobs want, which jobs start, and when a process starts again."""
