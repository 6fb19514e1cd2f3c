"""Models of the Hugging Face hub, through huggingface_hub: its cache, tokens and offline mode."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from paceline.errors import ConfigError, IntegrityError, UnavailableError
from paceline.models.arrived import Arrived, unheard
from paceline.models.weights import WANTED
from paceline.platform.files import locked, read_json, write_json

_SHA256 = re.compile(r"[0-9a-f]{64}")
_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class HubModel:
    """A commit of a repository, and the sizes of the files at its top."""

    repo: str
    commit: str
    sizes: Mapping[str, int]


class Hub:
    """Reads from the hub at HF_ENDPOINT with HF_TOKEN; with HF_HUB_OFFLINE from the cache alone."""

    def __init__(self, cache: Path | None, *, verified: Path, timeout_s: float = 45.0) -> None:
        """`cache`: that of huggingface_hub if None. `verified`: notes on files that were read."""
        self._cache = cache
        self._verified = verified
        self._timeout_s = timeout_s

    def find(self, repo: str, revision: str = "") -> HubModel:
        """The commit that a branch, a tag or a commit means now.

        Raises:
            ConfigError: the hub has no such repository or revision, or refuses access.
            UnavailableError: it cannot be reached, or the cache has no such revision offline.
        """
        if _offline():
            folder = self._cached(repo, revision)
            sizes = {each.name: each.stat().st_size for each in folder.iterdir() if each.is_file()}
            return HubModel(repo, folder.name, sizes)
        from huggingface_hub import HfApi

        with _translated(repo, revision):
            info = HfApi().model_info(
                repo, revision=revision or None, files_metadata=True, timeout=self._timeout_s
            )
        sizes = {
            e.rfilename: int(e.size or 0) for e in info.siblings or () if "/" not in e.rfilename
        }
        if info.sha is None:
            raise UnavailableError(f"model.path: the hub does not say the commit of {repo}")
        return HubModel(repo, info.sha, sizes)

    def read(self, model: HubModel, names: Sequence[str]) -> dict[str, bytes]:
        """The content of small files, without leaving them on disk; raises as `find`."""
        if _offline():
            folder = self._cached(model.repo, model.commit)
            return {name: (folder / name).read_bytes() for name in names}
        with TemporaryDirectory(prefix="paceline-model-") as folder:
            self._download(model.repo, model.commit, list(names), local_dir=folder)
            return {name: Path(folder, name).read_bytes() for name in names}

    def download(self, repo: str, commit: str, *, arrived: Arrived = unheard) -> Path:
        """Folder with the files of a commit, in the cache; large ones are read and compared.

        Processes that want the same files wait for each other.

        Raises:
            ConfigError: as `find`.
            UnavailableError: the hub cannot be reached and the cache does not have all of them.
            IntegrityError: a file differs from the digest that the hub has of it.
        """
        folder = Path(
            self._download(repo, commit, list(WANTED), arrived=arrived, cache_dir=self._cache)
        )
        for path in sorted(folder.glob("*.safetensors")):
            self._verify(path)
        return folder

    def _cached(self, repo: str, revision: str) -> Path:
        return Path(self._download(repo, revision, list(WANTED), cache_dir=self._cache))

    def _download(
        self,
        repo: str,
        revision: str,
        names: list[str],
        *,
        arrived: Arrived = unheard,
        **place: Any,
    ) -> str:
        from huggingface_hub import snapshot_download

        with _translated(repo, revision):
            return snapshot_download(
                repo,
                revision=revision or None,
                allow_patterns=names,
                ignore_patterns=["*/*"],
                etag_timeout=self._timeout_s,
                local_files_only=_offline(),
                tqdm_class=_silent(arrived),
                **place,
            )

    def _verify(self, path: Path) -> None:
        """Compare a file with its SHA-256, which is its name in the cache; once for each state."""
        blob = path.resolve()
        if not _SHA256.fullmatch(blob.name):
            return  # a cache without links, or a file that is not stored by its SHA-256
        state = [blob.stat().st_size, blob.stat().st_mtime_ns]
        note = self._verified / f"{blob.name}.json"
        with locked(self._verified / f"{blob.name}.lock"):
            if (read_json(note) or {}).get("state") == state:
                return
            found = _sha256(blob)
            if found != blob.name:
                raise IntegrityError(
                    f"model.path: {path} is damaged: SHA-256 {found[:12]}… instead of "
                    f"{blob.name[:12]}…; remove {blob}, so that it is downloaded again"
                )
            write_json(note, {"state": state})


def _offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _silent(arrived: Arrived) -> Any:
    """A progress bar that shows nothing: several threads of a service must not write to stderr.

    `arrived` is told of those that count bytes; other releases have none.
    """
    from huggingface_hub.utils import tqdm

    class Silent(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})
            self._counts = kwargs.get("unit") == "B"

        def update(self, n: float | None = 1) -> bool | None:
            if self._counts:
                self.n += n or 0  # which one that is disabled leaves
                arrived(float(self.n), float(self.total or 0))
            return None

    return Silent


def _sha256(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            found.update(block)
    return found.hexdigest()


@contextmanager
def _translated(repo: str, revision: str) -> Generator[None]:
    """Raise what the hub answers as our errors, which never quote a token."""
    from huggingface_hub import constants, errors

    hub, at = constants.ENDPOINT, f" at {revision}" if revision else ""
    try:
        yield
    except errors.GatedRepoError:
        raise ConfigError(
            f"model.path: {repo} is gated: accept its terms at {hub}/{repo}, and give gateway and "
            "trainer the HF_TOKEN of an account that has"
        ) from None
    except errors.RevisionNotFoundError:
        raise ConfigError(f"model.revision: {repo} on {hub} has no revision {revision!r}") from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            f"model.path: {repo} is neither a folder on the gateway's machine nor a repository on "
            f"{hub}; one that is private needs an HF_TOKEN for gateway and trainer"
        ) from None
    except (errors.HFValidationError, errors.EntryNotFoundError) as error:
        if isinstance(error, errors.LocalEntryNotFoundError):
            why = "HF_HUB_OFFLINE is set" if _offline() else f"{hub} cannot be reached"
            raise UnavailableError(
                f"model.path: {repo}{at} is not in the cache, and {why}; fetch it with "
                f"`hf download {repo}`"
            ) from None
        raise ConfigError(f"model.path: {repo}{at}: {_brief(error)}") from None
    # Of httpx or requests, as the release of huggingface_hub has it.
    except (errors.HTTPError, OSError) as error:  # pyright: ignore[reportPrivateImportUsage]
        raise UnavailableError(
            f"model.path: {repo}{at} is no folder on the gateway's machine, and {hub} cannot be "
            f"reached ({_brief(error)}); try again, or set HF_ENDPOINT to a mirror, or "
            "HF_HUB_OFFLINE=1 to use the cache"
        ) from None


def _brief(error: Exception) -> str:
    text = " ".join(str(error).split())
    token = os.environ.get("HF_TOKEN", "")
    text = text.replace(token, "…") if token else text
    return f"{type(error).__name__}: {text[:300]}"
