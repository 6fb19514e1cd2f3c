"""From `model` of a job to its files: the small ones at submit, all of them in the trainer."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.config.sections.model import ModelPlace, ModelSettings, ModelSpec
from paceline.errors import ConfigError
from paceline.models.arrived import Arrived, unheard
from paceline.models.hub import Hub
from paceline.models.store import ModelStores
from paceline.models.weights import check_weights

_HUB_VARIABLES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME")


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model that exists: pinned to its present content, with the small files asked for."""

    spec: ModelSpec
    files: dict[str, bytes]


class ModelResolver:
    """Finds and fetches models as the settings of an installation allow."""

    def __init__(self, settings: ModelSettings, *, run_dir: Path) -> None:
        cache = settings.cache or _default_cache(run_dir)
        self._settings = settings
        self._stores = ModelStores(settings.stores, cache / "stores")
        self._hub = Hub(
            _hub_cache(settings, cache), verified=cache / "verified", timeout_s=settings.timeout_s
        )

    def find(self, spec: ModelSpec, names: Sequence[str], *, max_bytes: int) -> FoundModel:
        """Pin a model of the hub or a store, and read those of its small files that exist.

        Raises:
            ConfigError: there is none, it has no safetensors weights, the installation does not
                allow it, or the small files have more than `max_bytes`.
            UnavailableError: the hub or the store cannot be reached.
        """
        if spec.place is ModelPlace.HUB:
            return self._find_on_hub(spec, names, max_bytes)
        model = self._stores.find(spec.path)
        if spec.digest not in ("", model.digest):
            raise ConfigError(f"model.digest: {spec.path} has other files: {model.digest}")

        def read(wanted: Sequence[str]) -> dict[str, bytes]:
            return self._stores.read(model, wanted)

        files = _small(model.sizes, names, read, max_bytes, spec.path)
        return FoundModel(spec.model_copy(update={"digest": model.digest}), files)

    def look_up(self, spec: ModelSpec) -> None:
        """Ask whether the hub has a model; raises as `find`."""
        self._check_hub()
        self._hub.find(spec.path, spec.revision)

    def folder(self, spec: ModelSpec, *, arrived: Arrived = unheard) -> Path:
        """Folder on this machine with all files of an accepted job's model.

        `arrived` is told of downloads, by other threads too.

        Raises:
            ConfigError: as `find`; or the content has changed since the job was accepted.
            UnavailableError: the hub or the store cannot be reached.
            IntegrityError: what was downloaded is damaged.
        """
        if spec.place is ModelPlace.HUB:
            self._check_hub()
            if not spec.revision:
                raise ConfigError(f"model.path: {spec.path} is not a folder on this machine")
            return self._hub.download(spec.path, spec.revision, arrived=arrived)
        if spec.place is ModelPlace.STORE:
            digest = spec.digest or self._stores.find(spec.path).digest
            return self._stores.download(spec.path, digest, arrived=arrived)
        return Path(spec.path)

    def _find_on_hub(self, spec: ModelSpec, names: Sequence[str], max_bytes: int) -> FoundModel:
        self._check_hub()
        model = self._hub.find(spec.path, spec.revision)

        def read(wanted: Sequence[str]) -> dict[str, bytes]:
            return self._hub.read(model, wanted)

        files = _small(model.sizes, names, read, max_bytes, spec.path)
        return FoundModel(spec.model_copy(update={"revision": model.commit}), files)

    def _check_hub(self) -> None:
        if not self._settings.hub:
            raise ConfigError("model.path: this installation takes no models from the hub")


def _small(
    sizes: Mapping[str, int],
    names: Sequence[str],
    read: Callable[[Sequence[str]], dict[str, bytes]],
    max_bytes: int,
    source: str,
) -> dict[str, bytes]:
    """Check the weights by their names, and read the small files in one go."""
    wanted = [name for name in names if name in sizes]
    total = sum(sizes[name] for name in wanted)
    if total > max_bytes:
        raise ConfigError(
            f"model.path: {source}: the small model files have {total} bytes; at most {max_bytes} "
            "are allowed"
        )
    files = read(wanted)
    config = files.get("config.json", b"{}")
    check_weights(sizes, lambda name: read([name])[name], source=source, config=config)
    return files


def _default_cache(run_dir: Path) -> Path:
    """In the run directory, or in the home directory where that is mounted read-only."""
    found = run_dir / "cache" / "models"
    try:
        found.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path.home() / ".cache" / "paceline" / "models"
    return found if os.access(found, os.W_OK) else Path.home() / ".cache" / "paceline" / "models"


def _hub_cache(settings: ModelSettings, cache: Path) -> Path | None:
    """Where models of the hub are cached; None: where huggingface_hub does, as users expect."""
    if any(os.environ.get(name) for name in _HUB_VARIABLES):
        return None
    if settings.cache is not None or not os.access(Path.home(), os.W_OK):
        return cache / "hub"
    return None
