"""Membership of workers, and the routes by which weights reach them."""
