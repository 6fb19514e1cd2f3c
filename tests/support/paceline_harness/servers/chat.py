"""A server of chat completions on this machine, whose answers a test chooses."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, bytes] | tuple[int, bytes, dict[str, str]]


def chat(text: str) -> Reply:
    """What an OpenAI-compatible server answers."""
    return 200, json.dumps(
        {"choices": [{"message": {"role": "assistant", "content": text}}]}
    ).encode()


class JudgeServer:
    """Answers each request by a function; remembers what came."""

    def __init__(self, answer: Callable[[dict[str, Any]], Reply], port: int = 0) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.open = self.most_open = 0
        lock, server = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                """Answer."""
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with lock:
                    server.requests.append(body | {"path": self.path})
                    server.keys.append(self.headers.get("authorization", ""))
                    server.open += 1
                    server.most_open = max(server.most_open, server.open)
                code, content, *headers = answer(body)
                with lock:
                    server.open -= 1
                self.send_response(code)
                for name, value in (headers[0] if headers else {}).items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing."""

        self._http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        """The base URL."""
        return f"http://127.0.0.1:{self.port}/v1"

    def close(self) -> None:
        """Stop; its port refuses connections."""
        self._http.shutdown()
        self._http.server_close()


@contextmanager
def serving(answer: Callable[[dict[str, Any]], Reply], port: int = 0) -> Generator[JudgeServer]:
    """A server while the context lasts; `port` 0 is any free one."""
    server = JudgeServer(answer, port)
    try:
        yield server
    finally:
        server.close()
