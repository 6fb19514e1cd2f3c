"""The API server's storage: objects, versions, watches, lists."""
