"""REST API calls, independent of the client that sends them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from paceline.api.documents import CodeView, JobView
from paceline.code.archive import pack
from paceline.config import JobSpec
from paceline.config.documents import read_yaml
from paceline.digest import digest_of

View = TypeVar("View", bound=BaseModel)
Spec = JobSpec | Mapping[str, Any] | Path | str


@dataclass(frozen=True, slots=True)
class RestCall(Generic[View]):
    """One call; empty and None values of `params` and of a mapping `body` are not sent."""

    method: str
    path: str
    view: type[View]
    params: Mapping[str, Any] = field(default_factory=dict[str, Any])
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    body: BaseModel | Mapping[str, Any] | str | bytes | None = None

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for `httpx` to send the request."""
        headers = dict(self.headers)
        if self.body is not None:
            headers.setdefault("content-type", "application/json")
        return {
            "method": self.method,
            "url": self.path,
            "params": _drop_empty(self.params),
            "headers": headers,
            "content": _content(self.body),
        }


def _drop_empty(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value not in (None, "", ())}


def _content(body: BaseModel | Mapping[str, Any] | str | bytes | None) -> str | bytes | None:
    if isinstance(body, BaseModel):
        return body.model_dump_json()
    return json.dumps(_drop_empty(body)) if isinstance(body, Mapping) else body


def with_code(spec: Spec) -> tuple[Spec, bytes]:
    """The job with the digest of its code, and the packed code; empty if it brings none.

    The folder `code.path` is relative to the job file, or to the working directory without one.

    Raises:
        ConfigError: the folder cannot be packed.
    """
    folder, raw = Path(), spec
    if isinstance(spec, (str, Path)):
        folder, raw = Path(spec).parent, read_yaml(Path(spec).read_text(), what=str(spec))
    elif isinstance(spec, JobSpec):
        raw = spec.model_dump(mode="json")
    code = raw.get("code") if isinstance(raw, Mapping) else None
    path = code.get("path") if isinstance(code, Mapping) and not code.get("digest") else None
    if not isinstance(path, str) or not path or not isinstance(raw, Mapping):
        return spec, b""  # what is wrong with it, the gateway says
    archive = pack(folder / path)
    return {**raw, "code": {"path": path, "digest": digest_of(archive)}}, archive


def upload(archive: bytes) -> RestCall[CodeView]:
    """Upload packed code."""
    headers = {"content-type": "application/zip"}
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
    return RestCall("POST", "/v1/jobs", JobView, headers=headers, body=content)
