"""Redis: connection, keys, Lua scripts, payloads. Nothing else in Paceline touches Redis.

Decisions: docs/decisions/ledger.md.
"""
