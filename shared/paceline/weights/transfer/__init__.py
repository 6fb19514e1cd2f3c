"""Transfers of whole versions: which peers to pull from, retries, and the server side."""
