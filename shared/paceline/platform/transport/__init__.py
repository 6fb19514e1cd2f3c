"""How two processes talk, and who may: gRPC, TLS, callers, access.

Decisions: docs/decisions/access.md.
"""
