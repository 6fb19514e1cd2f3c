"""Authentication and authorization: tokens, required roles, and refusals."""
