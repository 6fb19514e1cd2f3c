"""An HTTP server that behaves like SGLang, without a model: `python -m paceline_harness.sglang`.

It supports the SGLang flags that it needs and ignores the rest. The next token is a function of the
newest token and the weight version, so every server gives the same answers.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import binascii
import json
import math
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from paceline_harness.sglang_weights import FakeWeights, checksum, names_in_pickle

Release = tuple[int, int, int]
SPANS: Release = (0, 5, 20)
SESSIONS: Release = (0, 5, 21)
STRICT: Release = (0, 5, 22)
GRPC_DISTANCE = 10_000
KNOBS = {
    *("max_new_tokens", "stop", "stop_token_ids", "temperature", "top_p", "top_k", "min_p"),
    *("ignore_eos", "no_stop_trim", "sampling_seed", "stream_interval", "skip_special_tokens"),
}


@dataclass(slots=True, eq=False)
class Request:
    """A running request."""

    rid: str
    prompt: list[int]
    knobs: Mapping[str, Any]
    key: str
    cached: int = 0
    output: list[int] = field(default_factory=list[int])
    changes: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    end: dict[str, Any] | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)


class FakeSglang:
    """One server and its scheduler."""

    def __init__(
        self,
        *,
        vocab_size: int,
        context: int,
        version: str = "0.5.23",
        eos: int = -1,
        token_s: float = 0.002,
        abort_s: float = 0.05,
        incremental: bool = False,
        api_key: str = "",
        weights: FakeWeights | None = None,
    ) -> None:
        """`weights`: of a server that has a model; another one takes all tensors."""
        self.version = version
        self.release: Release = _release(version)
        self.label = "default"
        self.paused = ""
        self.session = False
        self.updates: list[str] = []
        self.fail_updates = 0
        self.hold_at: int | None = None  # number of tokens at which answers currently pause
        self._vocab_size = vocab_size
        self._context = context
        self._eos = eos
        self._token_s = token_s
        self._abort_s = abort_s
        self._incremental = incremental
        self._api_key = api_key
        self._weights = weights
        self._requests: dict[str, Request] = {}
        self._prefixes: set[tuple[str, tuple[int, ...]]] = set()
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._work = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self._stepping: asyncio.Task[None] | None = None
        self._aborts: set[asyncio.Task[None]] = set()

    async def start(self, *, host: str = "127.0.0.1", port: int = 0) -> str:
        """Serve; returns the URL."""
        self._runner = web.AppRunner(self.app(), access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        self._stepping = asyncio.create_task(self._step())
        real = self._runner.addresses[0][1]
        return f"http://{host}:{real}"

    async def stop(self) -> None:
        """Break all connections."""
        if self._stepping is not None:
            self._stepping.cancel()
        if self._runner is not None:
            await self._runner.cleanup()

    def app(self) -> web.Application:
        """All routes of this release."""

        @web.middleware
        async def authorise(request: web.Request, handler: Any) -> web.StreamResponse:
            wanted = f"Bearer {self._api_key}"
            if self._api_key and request.headers.get("Authorization") != wanted:
                return _error({"error": "Unauthorized"}, status=401)
            return await handler(request)

        app = web.Application(client_max_size=1 << 30, middlewares=[authorise])
        post, get = app.router.add_post, app.router.add_get
        post("/generate", self._generate)
        post("/abort_request", self._abort)
        post("/pause_generation", self._pause)
        post("/continue_generation", self._continue)
        post("/flush_cache", self._flush)
        post("/update_weights_from_disk", self._from_disk)
        post("/update_weights_from_tensor", self._from_tensor)
        post("/weights_checker", self._checksums)
        get("/server_info", self._server_info)
        get("/model_info", self._model_info)
        get("/health_generate", self._ready)
        post("/fail_updates", self._fail_updates)
        post("/hold", self._hold)
        if self.release >= SPANS:
            get("/ready", self._ready)
        if self.release >= SESSIONS:
            post("/begin_weight_update", self._begin)
            post("/end_weight_update", self._end)
        return app

    # generating -----------------------------------------------------------------------------

    async def _step(self) -> None:
        while True:
            await self._work.wait()
            await asyncio.sleep(self._token_s)
            running = [r for r in self._requests.values() if r.end is None]
            if not running:
                self._work.clear()
            if not self.paused:
                for request in running:
                    self._grow(request)

    def _grow(self, request: Request) -> None:
        if self.hold_at is not None and len(request.output) >= self.hold_at:
            return
        before = request.output[-1] if request.output else request.prompt[-1]
        token = next_token(before, self.label, self._vocab_size)
        request.output.append(token)
        knobs = request.knobs
        stops = [*knobs.get("stop_token_ids", ()), self._eos]
        if token in stops and not knobs.get("ignore_eos"):
            request.end = {"type": "stop", "matched": token}
        elif len(request.output) >= int(knobs.get("max_new_tokens", 128)):
            request.end = {"type": "length", "length": len(request.output)}
        request.news.set()

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        prompt = [int(t) for t in body.get("input_ids") or ()]
        knobs: dict[str, Any] = body.get("sampling_params") or {}
        rid = str(body.get("rid") or os.urandom(8).hex())
        if wrong := self._wrong(rid, prompt, knobs):
            return wrong
        if max(prompt) >= self._vocab_size or min(prompt) < 0:
            os._exit(1)
        while not self._resumed.is_set():
            await self._resumed.wait()
        if not knobs.get("max_new_tokens", 128):
            return web.json_response(self._scored(rid, prompt))
        request = Request(rid, prompt, knobs, str(body.get("extra_key") or ""))
        prefix = (request.key, tuple(prompt))
        request.cached = len(prompt) - 1 if prefix in self._prefixes else 0
        self._prefixes.add(prefix)
        self._requests[rid] = request
        self._work.set()
        try:
            return await self._answer(http, request, stream=bool(body.get("stream")))
        finally:
            self._requests.pop(rid, None)

    async def _answer(
        self, http: web.Request, request: Request, *, stream: bool
    ) -> web.StreamResponse:
        if not stream:
            while request.end is None:
                await request.news.wait()
                request.news.clear()
            return web.json_response(self._event(request, 0))
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(http)
        sent, ended = 0, False
        while not ended:
            await request.news.wait()
            request.news.clear()
            ended = request.end is not None
            event = self._event(request, sent if self._incremental else 0)
            sent = len(request.output)
            await reply.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await reply.write(b"data: [DONE]\n\n")
        return reply

    def _event(self, request: Request, start: int) -> dict[str, Any]:
        total, even = len(request.output), -math.log(self._vocab_size)
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": request.end,
            "prompt_tokens": len(request.prompt),
            "completion_tokens": total,
            "cached_tokens": request.cached,
            "weight_version": self.label,
            "output_token_logprobs": [[even, t, None] for t in request.output[start:]],
        }
        if self.release >= SPANS and request.end is not None:
            meta["weight_versions"] = self._spans(request)
        return {"text": "", "output_ids": request.output[start:], "meta_info": meta}

    def _spans(self, request: Request) -> list[dict[str, Any]]:
        spans: list[dict[str, Any]] = []
        start = 0
        for label, end in [*request.changes, (self.label, len(request.output))]:
            if end > start or not spans:
                spans.append({"version": label, "start": start, "end": end})
            start = end
        return spans

    def _scored(self, rid: str, prompt: Sequence[int]) -> dict[str, Any]:
        even = -math.log(self._vocab_size)
        rows = [[None if i == 0 else even, t, None] for i, t in enumerate(prompt)]
        meta = {"id": rid, "input_token_logprobs": rows, "completion_tokens": 0}
        return {"text": "", "output_ids": [], "meta_info": meta}

    def _wrong(self, rid: str, prompt: list[int], knobs: Mapping[str, Any]) -> web.Response | None:
        unknown = sorted(set(knobs) - KNOBS)
        room = self._context - len(prompt)
        if unknown and self.release >= STRICT:
            return _error({"error": f"sampling_params.{unknown[0]}: unknown"})
        if not prompt:
            return _error({"error": {"message": "input_ids is empty"}})
        if rid in self._requests:
            return _error({"object": "error", "message": f"Duplicate request ID {rid}"})
        if room <= 0 or int(knobs.get("max_new_tokens", 128)) > room:
            return _error({"error": {"message": "longer than the context"}})
        return None

    # control --------------------------------------------------------------------------------

    async def _abort(self, http: web.Request) -> web.Response:
        body = await http.json()
        start = "" if body.get("abort_all") else str(body.get("rid") or "\0")
        task = asyncio.create_task(self._abort_later(start))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)
        return web.Response()

    async def _abort_later(self, start: str) -> None:
        await asyncio.sleep(self._abort_s)
        self._abort_now(start)

    def _abort_now(self, start: str) -> None:
        for rid, request in self._requests.items():
            if rid.startswith(start) and request.end is None:
                request.end = {"type": "abort", "message": "aborted", "status_code": None}
                request.news.set()

    async def _pause(self, http: web.Request) -> web.Response:
        mode = (await http.json()).get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            return _error({"error": f"mode {mode}: unknown"})
        self._resumed.clear()
        if mode == "abort":
            self._abort_now("")
            while self._requests:
                await asyncio.sleep(0.01)
        self.paused = mode
        return web.json_response({"message": "paused", "status": "ok"})

    async def _continue(self, http: web.Request) -> web.Response:
        self.paused = ""
        self._resumed.set()
        return web.json_response({"message": "continued", "status": "ok"})

    def _flushed(self) -> bool:
        if self._requests and self.paused != "retract":
            return False
        self._prefixes.clear()
        return True

    async def _flush(self, http: web.Request) -> web.Response:
        done = self._flushed()
        return web.Response(status=200 if done else 400, text="flushed" if done else "busy")

    async def _begin(self, http: web.Request) -> web.Response:
        if self.session:
            return _failed("a weight update is already open")
        self.session = True
        return _done()

    async def _end(self, http: web.Request) -> web.Response:
        if not self.session:
            return _failed("no weight update is open")
        self.session = False
        return _done()

    async def _from_tensor(self, http: web.Request) -> web.Response:
        body = await http.json()
        if self.release >= SESSIONS and not self.session:
            return _failed("must run between begin_weight_update() and end_weight_update()")
        try:
            parts = [base64.b64decode(p, validate=True) for p in body["serialized_named_tensors"]]
        except (KeyError, binascii.Error):
            return _failed("serialized_named_tensors: not base64")
        if not all(part.startswith(b"\x80") for part in parts):
            return _failed("serialized_named_tensors: no pickle")
        return self._updated("tensor", body, *map(names_in_pickle, parts))

    async def _from_disk(self, http: web.Request) -> web.Response:
        body = await http.json()
        path = Path(str(body.get("model_path"))) / "model.safetensors"
        try:
            with path.open("rb") as file:
                header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        except (OSError, ValueError, struct.error) as error:
            return _failed(f"cannot load: {error}")
        return self._updated("disk", body, header)

    def _updated(self, way: str, body: Mapping[str, Any], *names: Iterable[str]) -> web.Response:
        if self.fail_updates:
            self.fail_updates -= 1
            return _failed("Failed to update parameter online. Please discard the whole weights.")
        if body.get("flush_cache", True) and not self._flushed():
            return _failed("Weights were updated, but the cache was not flushed")
        self.updates.append(way)
        if self._weights is not None:
            self._weights.load(chain.from_iterable(names), body.get("weight_version"))
        if body.get("weight_version") is not None:
            for request in self._requests.values():
                if request.output:
                    request.changes.append((self.label, len(request.output)))
            self.label = str(body["weight_version"])
        return _done()

    async def _fail_updates(self, http: web.Request) -> web.Response:
        """Not in SGLang: make the given number of updates fail."""
        self.fail_updates = int((await http.json())["times"])
        return _done()

    async def _hold(self, http: web.Request) -> web.Response:
        """Not in SGLang: pause answers at this number of tokens; null resumes them."""
        self.hold_at = (await http.json())["tokens"]
        return _done()

    async def _checksums(self, http: web.Request) -> web.Response:
        sums = {"all": checksum(self.label)} if self._weights is None else self._weights.checksums()
        ranks = [{"checksums": sums}]
        return web.json_response({"success": True, "message": "", "ranks": ranks})

    async def _server_info(self, http: web.Request) -> web.Response:
        return web.json_response({"version": self.version, "updates": self.updates})

    async def _model_info(self, http: web.Request) -> web.Response:
        return web.json_response({"model_path": "fake", "weight_version": self.label})

    async def _ready(self, http: web.Request) -> web.Response:
        return web.Response()


def next_token(token: int, label: str, vocab_size: int) -> int:
    """The token that follows a token under a weight version."""
    return (token * 7 + 3 + sum(label.encode())) % vocab_size


def _error(content: Mapping[str, Any], status: int = 400) -> web.Response:
    return web.json_response(dict(content), status=status)


def _failed(text: str) -> web.Response:
    return _error({"success": False, "message": text})


def _done() -> web.Response:
    return web.json_response({"success": True, "message": "Success"})


def _release(version: str) -> Release:
    major, minor, patch = (int(part) for part in version.split(".")[:3])
    return major, minor, patch


def _api_key(config: Path | None) -> str:
    return "" if config is None else yaml.safe_load(config.read_text())["api-key"]


async def _serve(given: argparse.Namespace) -> None:
    config = json.loads((Path(given.model_path) / "config.json").read_text())
    fake = FakeSglang(
        vocab_size=int(config["vocab_size"]),
        context=given.context_length,
        version=given.fake_version,
        eos=-1 if config.get("eos_token_id") is None else int(config["eos_token_id"]),
        token_s=given.fake_token_s,
        incremental=given.incremental_streaming_output,
        api_key=_api_key(given.config),
        weights=FakeWeights(config, forgets=given.fake_forgets),
    )
    if given.fake_grpc:
        grpc = given.port + GRPC_DISTANCE
        if grpc > 65_535:
            raise SystemExit(f"SGLANG_GRPC_PORT ({grpc}) must be between 1 and 65535")
        await asyncio.start_server(lambda reader, writer: writer.close(), given.host, grpc)
    await fake.start(host=given.host, port=given.port)
    await asyncio.Event().wait()


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--context-length", type=int, default=4096)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--incremental-streaming-output", action="store_true")
    parser.add_argument("--fake-grpc", action="store_true")  # as releases that always serve it
    parser.add_argument("--fake-version", default="0.5.23")
    parser.add_argument("--fake-forgets", default="")  # a part of names that its loader skips
    parser.add_argument("--fake-token-s", type=float, default=0.002)
    asyncio.run(_serve(parser.parse_known_args()[0]))


if __name__ == "__main__":
    main()
