"""Paceline: asynchronous RL post-training for LLM agents, as independent services.

`from paceline import Client, AsyncClient, JobSpec` is all that a program needs to submit and watch
jobs. These names are imported lazily.
"""

import os

from paceline.config.lazy import lazily

TYPE_CHECKING = False  # importing `typing` would take processes of 10 ms another 2 ms
if TYPE_CHECKING:
    from paceline.config import JobSpec
    from paceline.front.client import AsyncClient, Client

__version__ = "0.1.0"
__all__ = ["AsyncClient", "Client", "JobSpec", "__version__"]

# Paceline only forks to exec another program. gRPC's fork handlers would first restart threads in
# such a child, and occasionally crash it; gRPC reads this variable when it is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

__getattr__, __dir__ = lazily(
    __name__,
    {
        "AsyncClient": "paceline.front.client",
        "Client": "paceline.front.client",
        "JobSpec": "paceline.config",
    },
)
