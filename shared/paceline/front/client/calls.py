"""REST API calls, independent of the client that sends them."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

from pydantic import BaseModel

from paceline.config import JobSpec
from paceline.config.documents import read_yaml
from paceline.config.recipes import has_own_recipes, with_recipes
from paceline.front.api.documents import CodeView, JobView
from paceline.isolation.code.archive import pack, pack_data

_PIECE_BYTES = 256 << 10
# Longer than a gateway takes at most to try a model, its tokenizer, plug-ins and code in turn.
SUBMIT_TIMEOUT_S = 300.0
View = TypeVar("View", bound=BaseModel)
Spec = JobSpec | Mapping[str, Any] | Path | str


@dataclass(frozen=True, slots=True)
class Archive:
    """Packed code or data in a file without a name; it can be sent several times."""

    file: BinaryIO
    digest: str
    num_bytes: int

    @classmethod
    def of(cls, folder: Path, held: ExitStack) -> Archive:
        """Pack a file or folder of code, for as long as `held` is open; raises as `pack`."""
        return cls._of(folder, pack, held)

    @classmethod
    def of_data(cls, path: Path, held: ExitStack) -> Archive:
        """Pack a file or folder of data, for as long as `held` is open; raises as `pack_data`."""
        return cls._of(path, pack_data, held)

    @classmethod
    def _of(
        cls, path: Path, pack_into: Callable[[Path, BinaryIO], str], held: ExitStack
    ) -> Archive:
        file = held.enter_context(tempfile.TemporaryFile())  # noqa: SIM115  it is one
        digest = pack_into(path, file)
        return cls(file, digest, file.seek(0, os.SEEK_END))

    def pieces(self) -> Iterator[bytes]:
        """The archive from its start."""
        at = 0
        while data := self._piece(at):
            at += len(data)
            yield data

    async def pieces_in_loop(self) -> AsyncIterator[bytes]:
        """`pieces` without blocking the event loop."""
        at = 0
        while data := await asyncio.to_thread(self._piece, at):
            at += len(data)
            yield data

    def _piece(self, at: int) -> bytes:
        self.file.seek(at)
        return self.file.read(_PIECE_BYTES)


@dataclass(frozen=True, slots=True)
class RestCall(Generic[View]):
    """One call; empty and None values of `params` and of a mapping `body` are not sent."""

    method: str
    path: str
    view: type[View]
    params: Mapping[str, Any] = field(default_factory=dict[str, Any])
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    body: BaseModel | Mapping[str, Any] | str | bytes | Archive | None = None
    answer_s: float | None = None
    """Seconds that the answer may take; None: what the client allows."""

    def arguments(self, *, in_loop: bool = False) -> dict[str, Any]:
        """Keyword arguments for `httpx` to send the request; `in_loop`: for its `AsyncClient`."""
        headers = dict(self.headers)
        if self.body is not None:
            headers.setdefault("content-type", "application/json")
        timeout = {} if self.answer_s is None else {"timeout": self.answer_s}
        return {
            "method": self.method,
            "url": self.path,
            "params": _drop_empty(self.params),
            "headers": headers,
            "content": _content(self.body, in_loop=in_loop),
            **timeout,
        }


def _drop_empty(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value not in (None, "", ())}


def _content(body: Any, *, in_loop: bool) -> Any:
    if isinstance(body, Archive):
        return body.pieces_in_loop() if in_loop else body.pieces()
    if isinstance(body, BaseModel):
        return body.model_dump_json()
    return json.dumps(_drop_empty(body)) if isinstance(body, Mapping) else body


def with_uploads(
    spec: Spec, held: ExitStack, *, data: Path | None = None
) -> tuple[Spec, list[Archive]]:
    """The job with the digests of its code and data, and these, packed; none: it brings none.

    The archives are open until `held` is closed.

    Recipes that are files beside a job file are laid.

    `code.path` and `data.path` are relative to the job file, or to the working directory without
    one; `data` instead of the latter to the working directory.

    Raises:
        ConfigError: they cannot be packed.
    """
    folder, raw = Path(), spec
    if isinstance(spec, (str, Path)):
        folder, raw = Path(spec).parent, read_yaml(Path(spec).read_text(), what=str(spec))
    elif isinstance(spec, JobSpec):
        raw = spec.model_dump(mode="json")
    if not isinstance(raw, Mapping):
        return spec, []  # what is wrong with it, the gateway says
    is_laid = isinstance(spec, (str, Path)) and has_own_recipes(raw)
    changed, archives = dict(with_recipes(raw, folder=folder) if is_laid else raw), list[Archive]()
    if data is not None:
        changed["data"] = {"path": str(data.absolute())}
    for section, archive_of in (("code", Archive.of), ("data", Archive.of_data)):
        if path := _to_pack(changed.get(section)):
            archives.append(archive_of(folder / path, held))
            changed[section] = {"path": path, "digest": archives[-1].digest}
    return (changed, archives) if archives or is_laid else (spec, [])


def _to_pack(section: Any) -> str:
    """The path of code or data that are not uploaded yet."""
    if not isinstance(section, Mapping) or section.get("digest"):
        return ""
    path = section.get("path")
    return path if isinstance(path, str) else ""


def upload(archive: Archive) -> RestCall[CodeView]:
    """Upload packed code or data, in pieces."""
    digest = base64.b64encode(bytes.fromhex(archive.digest)).decode()
    headers = {
        "content-type": "application/zip",
        "content-length": str(archive.num_bytes),
        "repr-digest": f"sha-256=:{digest}:",
    }
    return RestCall("POST", "/v1/code", CodeView, headers=headers, body=archive)


def submit(spec: Spec, *, request_id: str = "") -> RestCall[JobView]:
    """Submit a `JobSpec`, a mapping, or a YAML file by its path."""
    media = "application/json"
    if isinstance(spec, (str, Path)):
        content, media = Path(spec).read_text(), "application/yaml"
    elif isinstance(spec, JobSpec):
        content = spec.model_dump_json()
    else:
        content = json.dumps(dict(spec))
    key = request_id or uuid.uuid4().hex
    headers = {"content-type": media, "idempotency-key": key}
    return RestCall(
        "POST", "/v1/jobs", JobView, headers=headers, body=content, answer_s=SUBMIT_TIMEOUT_S
    )
