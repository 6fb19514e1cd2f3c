"""Jobs: their records, live ledgers, history, exports, and what trainers ask.

Decisions: docs/decisions/lifecycle.md.
"""
