"""REST API calls, independent of the client that sends them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from paceline.api.documents import JobView
from paceline.config import JobSpec

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
    body: BaseModel | Mapping[str, Any] | str | None = None

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


def _content(body: BaseModel | Mapping[str, Any] | str | None) -> str | None:
    if isinstance(body, BaseModel):
        return body.model_dump_json()
    return json.dumps(_drop_empty(body)) if isinstance(body, Mapping) else body


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
