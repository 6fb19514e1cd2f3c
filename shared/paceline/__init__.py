"""Paceline: asynchronous RL post-training for LLM agents, as independent services."""

import os

__version__ = "0.1.0"

# Paceline only forks to execute another program. gRPC's fork handlers would restart its threads in
# such a child first, and now and then crash it; gRPC reads this when it is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
