"""A server that speaks as much of the Hugging Face hub's API as reading models needs."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

_API = re.compile(r"/api/models/([\w.-]+/[\w.-]+)(?:/revision/([^/]+))?")
_TREE = re.compile(r"/api/models/([\w.-]+/[\w.-]+)/tree/([^/]+)")
_FILE = re.compile(r"/([\w.-]+/[\w.-]+)/resolve/([^/]+)/(.+)")
_LFS = (".safetensors", ".bin")


@dataclass
class Repo:
    """A repository: its commits, each a mapping of names to contents, and its branches."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict[str, dict[str, bytes]])
    branches: dict[str, str] = field(default_factory=dict[str, str])
    gated: bool = False
    token: str = ""  # which it needs, if any

    def push(self, files: dict[str, bytes], *, branch: str = "main") -> str:
        """Commit these files to a branch; returns the commit."""
        listed = sorted((name, hashlib.sha1(data).hexdigest()) for name, data in files.items())
        commit = hashlib.sha1(json.dumps(listed).encode()).hexdigest()
        self.commits[commit], self.branches[branch] = dict(files), commit
        return commit

    def at(self, revision: str) -> str | None:
        """The commit of a branch or commit."""
        return self.branches.get(revision, revision if revision in self.commits else None)


class FakeHub:
    """Repositories by id, and the requests that came."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[tuple[str, str, str]] = []  # method, path, Authorization
        self.damaged: set[str] = set()  # names of files that are served with other bytes
        self.url = ""

    def repo(self, name: str, **fields: Any) -> Repo:
        """A repository, made if it does not exist."""
        return self.repos.setdefault(name, Repo(**fields))

    def downloads(self, name: str) -> int:
        """How often a file was sent."""
        return sum(m == "GET" and p.endswith(f"/{name}") for m, p, _ in self.requests)


@contextmanager
def serving_hub() -> Generator[FakeHub]:
    """A hub on loopback."""
    hub = FakeHub()

    class Handler(_Handler):
        of = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    of: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on stderr."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        sent = self.headers.get("authorization", "")
        self.of.requests.append((self.command, path, sent))
        for pattern, answer in ((_TREE, self._tree), (_API, self._info), (_FILE, self._file)):
            if found := pattern.fullmatch(path):
                repo = self.of.repos.get(found[1])
                if repo is None or (repo.token and not repo.gated and not self._knows(repo)):
                    return self._refuse(401, "RepoNotFound", "Repository Not Found")
                is_public = pattern is _API  # what a gated repository has may be listed
                if repo.gated and not is_public and not self._knows(repo):
                    return self._refuse(403, "GatedRepo", "Access to this model is restricted")
                commit = repo.at(found[2] or "main")
                if commit is None:
                    return self._refuse(404, "RevisionNotFound", "Revision Not Found")
                return answer(found, repo, commit)
        return self._refuse(404, "EntryNotFound", "Not Found")

    def _knows(self, repo: Repo) -> bool:
        return self.headers.get("authorization") == f"Bearer {repo.token}"

    def _info(self, found: re.Match[str], repo: Repo, commit: str) -> None:
        siblings = [
            {"rfilename": name, "size": len(data), "blobId": _blob(data)}
            for name, data in repo.commits[commit].items()
        ]
        self._json({"id": found[1], "sha": commit, "siblings": siblings, "gated": repo.gated})

    def _tree(self, found: re.Match[str], repo: Repo, commit: str) -> None:
        listed: list[dict[str, Any]] = []
        for name, data in repo.commits[commit].items():
            entry: dict[str, Any] = {
                "type": "file",
                "path": name,
                "size": len(data),
                "oid": _blob(data),
            }
            if name.endswith(_LFS):
                digest = hashlib.sha256(data).hexdigest()
                entry["lfs"] = {"oid": digest, "size": len(data), "pointerSize": 134}
            listed.append(entry)
        self._json(listed)

    def _file(self, found: re.Match[str], repo: Repo, commit: str) -> None:
        data = repo.commits[commit].get(found[3])
        if data is None:
            return self._refuse(404, "EntryNotFound", "Entry not found")
        is_large = found[3].endswith(_LFS)
        etag = hashlib.sha256(data).hexdigest() if is_large else _blob(data)
        if found[3] in self.of.damaged:
            data = data[:-1] + bytes([data[-1] ^ 1])
        start = 0
        if wanted := re.fullmatch(r"bytes=(\d+)-\d*", self.headers.get("range", "")):
            start = int(wanted[1])
        headers = {
            "x-repo-commit": commit,
            "etag": f'"{etag}"',
            "content-type": "application/octet-stream",
            **({"x-linked-etag": f'"{etag}"', "x-linked-size": str(len(data))} if is_large else {}),
        }
        if start:
            headers["content-range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._send(206 if start else 200, headers, data[start:])

    def _refuse(self, status: int, code: str, text: str) -> None:
        headers = {"x-error-code": code, "x-error-message": text}
        self._send(status, headers, json.dumps({"error": text}).encode())

    def _json(self, content: Any) -> None:
        self._send(200, {"content-type": "application/json"}, json.dumps(content).encode())

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _blob(data: bytes) -> str:
    """The id that git gives a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
