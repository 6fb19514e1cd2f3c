"""Who pulls weights from whom: decided from measured links, known to no transport."""
