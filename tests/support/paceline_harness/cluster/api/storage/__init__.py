"""What the API server keeps: objects, versions, watches, lists."""
