"""A package index of wheels on loopback, that keeps what it was asked."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

from packaging.utils import canonicalize_name

JSON = "application/vnd.pypi.simple.v1+json"


@dataclass
class PackageIndex:
    """Serves the files of a folder: `/simple/NAME/` lists them, `/files/FILE` is one of them."""

    folder: Path
    url: str = ""  # of the index
    credentials: str = ""  # `USER:PASSWORD` that are needed
    speaks_json: bool = False
    has_metadata: bool = False  # beside wheels: what the file `WHEEL.metadata` has
    yanked: set[str] = field(default_factory=set[str])
    requires_python: dict[str, str] = field(default_factory=dict[str, str])
    wrong_hash: set[str] = field(default_factory=set[str])
    redirects: dict[str, str] = field(default_factory=dict[str, str])  # by path, to an URL
    page: bytes = b""  # of every project, instead of a list of files
    asked: list[str] = field(default_factory=list[str])  # paths

    @property
    def private_url(self) -> str:
        """The URL of the index with its credentials."""
        return self.url.replace("//", f"//{self.credentials}@", 1)

    def files_of(self, project: str) -> list[Path]:
        """Files of a project, by their names."""
        paths = sorted(each for each in self.folder.iterdir() if each.suffix != ".metadata")
        return [
            each
            for each in paths
            if canonicalize_name(each.name.partition("-")[0]) == canonicalize_name(project)
        ]

    def html_of(self, project: str) -> bytes:
        """A page as PEP 503 has it."""
        return self.page or "".join(self._anchor(each) for each in self.files_of(project)).encode()

    def json_of(self, project: str) -> bytes:
        """A page as PEP 691 has it."""
        files = [
            {
                "filename": path.name,
                "url": f"/files/{path.name}",
                "hashes": {"sha256": self._digest(path)},
                "yanked": path.name in self.yanked,
                "core-metadata": self._metadata_hash(path) or False,
                "requires-python": self.requires_python.get(path.name),
            }
            for path in self.files_of(project)
        ]
        return json.dumps({"meta": {"api-version": "1.0"}, "files": files}).encode()

    def _anchor(self, path: Path) -> str:
        more = ' data-yanked="broken"' if path.name in self.yanked else ""
        if needed := self.requires_python.get(path.name):
            more += f' data-requires-python="{html.escape(needed)}"'
        if hashes := self._metadata_hash(path):
            more += f' data-core-metadata="sha256={hashes["sha256"]}"'
        return f'<a href="/files/{path.name}#sha256={self._digest(path)}"{more}>{path.name}</a>\n'

    def _metadata_hash(self, path: Path) -> dict[str, str] | None:
        beside = path.with_name(f"{path.name}.metadata")
        if not self.has_metadata or not beside.exists():
            return None
        return {"sha256": hashlib.sha256(beside.read_bytes()).hexdigest()}

    def _digest(self, path: Path) -> str:
        content = b"other" if path.name in self.wrong_hash else path.read_bytes()
        return hashlib.sha256(content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, index: PackageIndex, *arguments: object) -> None:
        self.index = index
        super().__init__(*arguments)  # pyright: ignore

    def do_GET(self) -> None:
        """Answer a page or a file."""
        self.index.asked.append(self.path)
        expected = base64.b64encode(self.index.credentials.encode()).decode()
        if self.index.credentials and self.headers["Authorization"] != f"Basic {expected}":
            self.send_response(401)
            self.send_header("WWW-Authenticate", "Basic")
            self.end_headers()
            return
        if self.path in self.index.redirects:
            self.send_response(302)
            self.send_header("Location", self.index.redirects[self.path])
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        parts = unquote(self.path).strip("/").split("/")
        path = self.index.folder / parts[-1]
        if parts[0] == "simple" and len(parts) == 2 and self.index.files_of(parts[1]):
            as_json = self.index.speaks_json
            page = self.index.json_of(parts[1]) if as_json else self.index.html_of(parts[1])
            self._send(page, JSON if as_json else "text/html")
        elif parts[0] == "files" and path.is_file():
            self._send(path.read_bytes(), "application/octet-stream")
        else:
            self.send_error(404)

    def _send(self, content: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def serving(index: PackageIndex) -> Generator[PackageIndex]:
    """The index at a free port of loopback; its `url` is set."""
    index.folder.mkdir(exist_ok=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, index))
    index.url = f"http://127.0.0.1:{server.server_address[1]}/simple"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield index
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
