"""The API server as a process: prints the path of the kubeconfig and serves until signalled."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

from kubernetes_double.api import ApiServer


def main() -> None:
    """Serve until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m kubernetes_double.api")
    parser.add_argument("--folder", type=Path, required=True, help="for the kubeconfig")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    given = parser.parse_args()
    ends = (signal.SIGINT, signal.SIGTERM)
    # Before threads start, since they inherit the mask.
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    with ApiServer(folder=given.folder, host=given.host, port=given.port) as server:
        print(server.kubeconfig, flush=True)
        signal.sigwait(ends)


if __name__ == "__main__":
    main()
