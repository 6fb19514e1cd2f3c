"""Paceline: asynchronous RL post-training for LLM agents, as independent services.

`from paceline import Client, AsyncClient, JobSpec`: what a program needs that submits jobs and
follows them. They are imported when they are first asked for.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.client import AsyncClient, Client
    from paceline.config import JobSpec

__version__ = "0.1.0"
__all__ = ["AsyncClient", "Client", "JobSpec", "__version__"]

# Paceline only forks to execute another program. gRPC's fork handlers would restart its threads in
# such a child first, and now and then crash it; gRPC reads this when it is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

_LAZY = {
    "AsyncClient": "paceline.client",
    "Client": "paceline.client",
    "JobSpec": "paceline.config",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
