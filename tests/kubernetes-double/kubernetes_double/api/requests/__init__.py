"""Requests: HTTP, paths, patches, subresources, errors."""
