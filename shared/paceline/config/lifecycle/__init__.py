"""When jobs end, what they continue from, and who is told."""
