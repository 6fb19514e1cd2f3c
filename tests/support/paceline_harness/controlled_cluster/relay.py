"""A TCP relay that can cut connections."""

from __future__ import annotations

import select
import socket
import threading


class Relay:
    """A TCP relay in front of the API server that can cut connections."""

    def __init__(self, target: int) -> None:
        self._cut = False
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Close all connections and accept no others until `mend`."""
        with self._lock:
            self._cut = True
            for pair in self._pairs:
                for end in pair:
                    end.close()
            self._pairs.clear()

    def mend(self) -> None:
        self._cut = False

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:  # the server has ended
                near.close()
                continue
            with self._lock:
                if self._cut:
                    near.close()
                    far.close()
                    continue
                self._pairs.append((near, far))
            threading.Thread(target=self._pump, args=(near, far), daemon=True).start()

    def _pump(self, near: socket.socket, far: socket.socket) -> None:
        try:
            while True:
                readable, _, _ = select.select([near, far], [], [], 0.2)
                for end in readable:
                    data = end.recv(65536)
                    if not data:
                        return
                    (far if end is near else near).sendall(data)
        except (OSError, ValueError):
            return
        finally:
            near.close()
            far.close()
