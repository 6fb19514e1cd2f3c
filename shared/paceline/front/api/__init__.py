"""The REST API: documents that the gateway writes and clients read."""
