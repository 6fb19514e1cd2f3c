"""Task sources: collections of problem instances, addressed by position."""
