"""The API server: assembles its parts, runs them in a thread, writes kubeconfig files."""

from __future__ import annotations

import asyncio
import base64
import socket
import ssl
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml
from aiohttp import web

from kubernetes_double.api.policy.access import Authorizer, Tokens, Visit
from kubernetes_double.api.policy.admission import Admission
from kubernetes_double.api.policy.certificates import Authority
from kubernetes_double.api.policy.collector import Collector, matters
from kubernetes_double.api.requests.http import Api
from kubernetes_double.api.requests.logs import PodLogs
from kubernetes_double.api.resources.kinds import Kinds
from kubernetes_double.api.storage.objects import Objects
from kubernetes_double.api.storage.store import Change, Store
from kubernetes_double.api.storage.streams import Watches
from kubernetes_double.errors import NotFoundError

Object = dict[str, Any]
NAMESPACES = ("default", "kube-system", "kube-public", "kube-node-lease")
PATIENCE_S = 60.0


class ApiServer:
    """A Kubernetes API over HTTPS, in its own thread; a context manager.

    The kubeconfig is written to `folder`. It listens on `host` and `port` (0: any free port);
    `names` are further names and addresses in its certificate; `keep` bounds the history.
    """

    def __init__(
        self,
        *,
        folder: Path,
        host: str = "127.0.0.1",
        port: int = 0,
        names: Sequence[str] = (),
        keep: int = 4096,
        bookmark_s: float = 60.0,
    ) -> None:
        self.folder = folder
        self.host = host
        self.port = port
        self.authority = Authority(["127.0.0.1", "::1", "localhost", *SERVICE_NAMES, host, *names])
        self.store = Store(keep=keep)
        self.kinds = Kinds()
        self.objects = Objects(self.store, self.kinds, Admission(self.store))
        self.collector = Collector(self.objects, self.authority.certificate)
        self.tokens = Tokens(self.store)
        self.visits: deque[Visit] = deque(maxlen=100_000)
        self.watches = Watches(self.store, bookmark_s=bookmark_s)
        self.api = Api(
            self.objects,
            self.tokens,
            Authorizer(self.store),
            self.watches,
            PodLogs(self.store),
            self.visits,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._stopping = asyncio.Event()
        self._due = asyncio.Event()

    @property
    def url(self) -> str:
        """The URL for clients on this machine."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"https://{host}:{self.port}"

    @property
    def kubeconfig(self) -> Path:
        """The kubeconfig file of the administrator."""
        return self.folder / "kubeconfig.yaml"

    def __enter__(self) -> ApiServer:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._thread.start()
        self._call(self._start())
        self._write_config(self.kubeconfig, self.tokens.admin, "default")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()

    def token_for(self, namespace: str, name: str) -> str:
        """A token of a ServiceAccount. Raises NotFoundError if the account does not exist."""
        token = self._call(self._on_loop(lambda: self.tokens.issue(namespace, name)))
        if token is None:
            raise NotFoundError(f"no ServiceAccount {name!r} in the namespace {namespace!r}")
        return token

    def kubeconfig_for(self, namespace: str, name: str) -> Path:
        """A kubeconfig file for a ServiceAccount. Raises NotFoundError if it does not exist."""
        path = self.folder / f"kubeconfig-{namespace}-{name}.yaml"
        self._write_config(path, self.token_for(namespace, name), namespace)
        return path

    def visits_of(self, identity: str) -> list[Visit]:
        """Requests so far by a user, or by `system:serviceaccount:NAMESPACE:NAME`."""
        seen: list[Visit] = self._call(self._on_loop(lambda: list(self.visits)))
        return [one for one in seen if one.identity == identity]

    def expire_history(self) -> None:
        """Drop the history: watches that resume from earlier get a 410."""
        self._call(self._on_loop(self.store.expire))

    def listen(self, listener: socket.socket) -> None:
        """Also serve on another bound socket, possibly of another network namespace."""
        self._call(self._serve(listener))

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE_S)

    async def _on_loop(self, action: Any) -> Any:
        return action()

    async def _start(self) -> None:
        for name in NAMESPACES:
            resource = self.kinds.resource("", "v1", "namespaces")
            self.objects.found(resource, "", {"metadata": {"name": name}})
        self.collector.sweep()
        self.store.listen(self._notice)
        self._sweeper = asyncio.create_task(self._sweep())
        self._runner = web.AppRunner(
            self.api.application(), access_log=None, shutdown_timeout=1.0, handler_cancellation=True
        )
        await self._runner.setup()
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        listener = socket.create_server((self.host, self.port), family=family)
        self.port = listener.getsockname()[1]
        await self._serve(listener)

    async def _serve(self, listener: socket.socket) -> None:
        site = web.SockSite(self._runner, listener, ssl_context=self._context())
        await site.start()

    def _context(self) -> ssl.SSLContext:
        return self.authority.context(self.folder)

    def _notice(self, change: Change) -> None:
        if matters(change):
            self._due.set()

    async def _sweep(self) -> None:
        while True:
            await self._due.wait()
            self._due.clear()
            while self.collector.sweep():
                await asyncio.sleep(0)
            await asyncio.sleep(0.02)

    async def _stop(self) -> None:
        self._sweeper.cancel()
        self.watches.close()
        await self._runner.cleanup()

    def _write_config(self, path: Path, token: str, namespace: str) -> None:
        authority = base64.b64encode(self.authority.certificate.encode()).decode()
        name = "kubernetes-double"
        cluster = {"server": self.url, "certificate-authority-data": authority}
        context = {"cluster": name, "user": name, "namespace": namespace}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": name, "cluster": cluster}],
            "users": [{"name": name, "user": {"token": token}}],
            "contexts": [{"name": name, "context": context}],
            "current-context": name,
        }
        path.touch(mode=0o600)
        path.write_text(yaml.safe_dump(content))


SERVICE_NAMES = ("kubernetes", "kubernetes.default", "kubernetes.default.svc")
