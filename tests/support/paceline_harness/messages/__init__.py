"""Messages that tests send to services."""
