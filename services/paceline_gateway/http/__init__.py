"""REST: the application, its routes, documents and error responses, and the HTTP server."""
