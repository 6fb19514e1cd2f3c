"""The API server as a process: prints the path of the kubeconfig and serves until told to stop."""

from __future__ import annotations

import argparse
import signal
import threading
from pathlib import Path
from types import FrameType

from paceline.testing.cluster.api import ApiServer


def main() -> None:
    """Serve until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m paceline.testing.cluster.api")
    parser.add_argument("--folder", type=Path, required=True, help="for the kubeconfig")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    given = parser.parse_args()
    stop = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        stop.set()

    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, end)
    with ApiServer(folder=given.folder, host=given.host, port=given.port) as server:
        print(server.kubeconfig, flush=True)
        stop.wait()


if __name__ == "__main__":
    main()
