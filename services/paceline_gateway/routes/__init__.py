"""REST by resource."""
