"""The section `model` of a job file, and where an installation takes models from."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from paceline.config.sections.endpoint_model import EndpointModelSpec
from paceline.plugins import StrictModel

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
Scheme = Annotated[str, Field(pattern="^[a-z][a-z0-9+.-]*$", max_length=32)]


class ModelPlace(StrEnum):
    """Kind of place that `model.path` names."""

    FOLDER = "folder"
    HUB = "hub"
    STORE = "store"
    ENDPOINT = "endpoint"


class ModelSpec(StrictModel):
    """The model to train."""

    path: str = Field(max_length=1024)
    """Folder in Hugging Face layout, readable by gateway and trainer; or the id of a repository on
    the Hugging Face hub (`HuggingFaceTB/SmolLM2-135M-Instruct`); or the URL of a folder in an
    object store (`s3://bucket/models/mine`). A folder that exists is preferred to an id. With
    `endpoint`: the name that its server gives to the model."""
    endpoint: EndpointModelSpec | None = None
    """Who answers in a job of kind `eval`, instead of workers that load the model."""
    revision: str = Field(default="", max_length=128)
    """Branch, tag or commit of a hub repository; its default branch if empty. The accepted job has
    the commit."""
    digest: str = Field(default="", max_length=64, pattern="^([0-9a-f]{64})?$")
    """SHA-256 of the names, sizes and versions of the files of a folder in an object store. Filled
    in when the job is submitted; the job fails if the folder has changed since."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the engine and of the published weights. `auto`: bfloat16 on devices that have
    units for it, else float32; decided when the job is submitted."""

    @property
    def place(self) -> ModelPlace:
        """Kind of place that `path` names here; a hub id of an accepted job has a revision."""
        if self.endpoint is not None:
            return ModelPlace.ENDPOINT
        if "://" in self.path:
            return ModelPlace.STORE
        if self.revision:
            return ModelPlace.HUB
        if _HUB_ID.fullmatch(self.path) and not is_folder(Path(self.path)):
            return ModelPlace.HUB
        return ModelPlace.FOLDER


class ModelSettings(StrictModel):
    """Where models of jobs may come from, and where they are cached: the section `models`."""

    hub: bool = True
    """Whether jobs may name repositories of the hub. HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE of
    the process apply; all tenants share the token."""
    stores: tuple[Scheme, ...] = Field(default=("s3", "gs", "gcs", "az", "abfs"), max_length=16)
    """Schemes of URLs that jobs may name; the credentials are those of the process."""
    cache: Path | None = None
    """Folder for models of object stores, and, if it is set, for those of the hub. If null:
    `cache/models` in the run directory, or `~/.cache/paceline/models` where that is read-only."""
    timeout_s: float = Field(default=45.0, gt=0, le=600)
    """For the small files of a model when a job is submitted."""


def is_folder(path: Path) -> bool:
    """Whether it is a folder on this machine; no for what cannot be a path."""
    try:
        return path.is_dir()
    except (OSError, ValueError):  # e.g. the name is too long, or has NUL
        return False
