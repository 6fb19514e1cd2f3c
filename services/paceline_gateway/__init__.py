"""REST and gRPC job API."""
