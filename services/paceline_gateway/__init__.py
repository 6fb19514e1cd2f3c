"""The gateway: REST and gRPC API for users."""
