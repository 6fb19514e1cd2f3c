"""REST routes by resource."""
