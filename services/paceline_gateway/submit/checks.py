"""Checks a job's plug-ins, patterns and model files at submit, without heavy imports.

`parse_job` in shared/paceline/config/load.py validates the job file itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from paceline.config import JobSpec
from paceline.config.named import patterns as named_patterns
from paceline.config.named import problems
from paceline.config.quota import MAX_MODEL_FILES_BYTES
from paceline.config.sections.model import ModelPlace, ModelSpec
from paceline.environments.dataset.options import DatasetOptions
from paceline.errors import ConfigError, InvalidError
from paceline.errors.wording import shown
from paceline.models.parsing import ParseError, parse
from paceline.models.resolve import FoundModel, ModelResolver
from paceline.models.weights import INDEX, check_headers, check_weights
from paceline.platform.beneath import ReadableFolders, is_of_kernel
from paceline.platform.transport.rpc import MAX_MESSAGE_BYTES
from paceline.plugins import Replies, registry
from paceline.plugins.allowed import AllowedTargets
from paceline_gateway.submit.patterns import Patterns

MODEL_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
NEEDED = ("config.json", "tokenizer.json")
# Sent in one message together with the job.
MAX_MODEL_VALUES = 4_000_000
MAX_FILES_BYTES = min(MAX_MODEL_FILES_BYTES, MAX_MESSAGE_BYTES - (1 << 20))


def check_code(spec: JobSpec) -> None:
    """Raise `ConfigError` for code or data that is not uploaded: a gateway reads no folders."""
    if spec.code is not None and not spec.code.digest:
        raise ConfigError(
            "code.digest: is missing; `paceline submit`, `paceline run` and the SDK pack the "
            "folder code.path and fill it in, others upload a zip archive with POST /v1/code"
        )
    if spec.data is not None and not spec.data.digest:
        raise ConfigError(
            "data.digest: is missing; `paceline submit`, `paceline run` and the SDK pack the file "
            "or folder data.path and fill it in, others upload a zip archive with POST /v1/code"
        )


async def check_plugins(
    spec: JobSpec, patterns: Patterns, tenant: str, allowed: AllowedTargets
) -> None:
    """Raise `ConfigError` for plug-ins that may not be named or refuse their options, by field."""
    wrong = [*problems(spec, allowed=allowed), *await _pattern_problems(spec, patterns, tenant)]
    if wrong:
        raise ConfigError("; ".join(wrong))


async def _pattern_problems(spec: JobSpec, patterns: Patterns, tenant: str) -> list[str]:
    """Problems of regular expressions, which malicious ones make slow to compile."""
    texts = named_patterns(spec)
    wrong = await patterns.problems(list(texts.values()), tenant)
    return [
        f"{field}: not a regular expression: {problem} (got {shown(text)})"
        for (field, text), problem in zip(texts.items(), wrong, strict=True)
        if problem
    ]


def replies_of(spec: JobSpec) -> frozenset[Replies]:
    """Who answers the policy in a job's episodes; worlds of its own code may reply.

    Rows may be mixed with tasks of other environments, each with a world of its own.
    """
    if spec.has_own_environment:
        return frozenset({"user"})
    names = {spec.tasks.environment, *_mixed(spec)}
    return frozenset(registry.environment(name).replies for name in names)


def _mixed(spec: JobSpec) -> Iterator[str]:
    """The environments whose tasks are mixed with rows, in training and evaluation."""
    if spec.tasks.environment != "dataset":
        return
    of_evals = (evaluation.options for evaluation in spec.eval_sets.values())
    for options in ({}, *of_evals):
        wanted = DatasetOptions.model_validate({**spec.tasks.options, **options})
        yield from (source.environment for source in wanted.sources if source.environment)


def find_model(spec: ModelSpec, resolver: ModelResolver) -> FoundModel:
    """The small files of a model by name; one of the hub or a store is pinned to its content.

    Raises:
        ConfigError: there is no such model, or the trainer could not train it.
        UnavailableError: the hub or the store cannot be reached.
    """
    if spec.place is ModelPlace.FOLDER:
        # A relative path must not be taken for a hub id where the folder does not exist.
        folder = Path(spec.path) if spec.path.startswith("/") else Path(spec.path).absolute()
        return FoundModel(spec.model_copy(update={"path": str(folder)}), read_model(folder))
    model = resolver.find(spec, MODEL_FILES, max_bytes=MAX_FILES_BYTES)
    return FoundModel(model.spec, check_files(model.files, source=spec.path))


def read_model(path: Path) -> dict[str, bytes]:
    """The small files of a model folder by name.

    Raises:
        ConfigError: it is not a model folder, has no tokenizer or no intact safetensors, or cannot
            be read.
    """
    try:
        return _read_model(path)
    except (OSError, ValueError) as error:  # a name too long or with NUL, no permission, ...
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"model.path: {shown(str(path))}: {why}") from None


def _read_model(path: Path) -> dict[str, bytes]:
    if not path.exists():
        raise ConfigError(f"model.path: {path} does not exist")
    if not path.is_dir():
        raise ConfigError(f"model.path: {path} is not a folder")
    if is_of_kernel(path):
        raise ConfigError(f"model.path: {path}: a folder on a disk is needed")
    path = Path(os.path.realpath(path))  # links of /proc are followed by their text only
    files = check_files(_small_files(path), source=str(path))
    sizes = {file.name: file.stat().st_size for file in path.iterdir() if file.is_file()}
    config, index = files["config.json"], path / INDEX
    names = check_weights(
        sizes, lambda name: (path / name).read_bytes(), source=str(path), config=config
    )
    check_headers(
        [path / name for name in names],
        config=config,
        index=index.read_bytes() if index.name in sizes else b"{}",
    )
    return files


def _small_files(path: Path) -> dict[str, bytes]:
    """The files kept with the job and shown to its tenant; no link may lead to other files."""
    roots = [path]
    if path.parent.name == "snapshots":  # of huggingface_hub, whose files are links to these
        roots.append(path.parent.parent / "blobs")
    readable = ReadableFolders(
        tuple(map(str, roots)),
        shared=False,
        outside="is a link to outside of the model's folder; put a copy of the file there",
        are_real=True,  # who writes in that folder may have put a link to any other there
    )
    files: dict[str, bytes] = {}
    left = MAX_FILES_BYTES
    for name in MODEL_FILES:
        if not (path / name).is_file():
            continue
        try:
            with readable.open(path / name, f"model.path: {path}/{name}") as file:
                files[name] = file.read(left + 1)
        except InvalidError as error:
            raise ConfigError(error.message) from None
        left -= len(files[name])
        if left < 0:
            total = sum((path / kept).stat().st_size for kept in MODEL_FILES if kept in files)
            raise ConfigError(f"model.path: {path}: {_too_large(total)}")
    return files


def check_files(files: Mapping[str, bytes], *, source: str) -> dict[str, bytes]:
    """Check that the files include a tokenizer and a readable configuration."""
    for name in NEEDED:
        if name not in files:
            raise ConfigError(f"model.path: {source} has no {name}")
    if unknown := sorted(set(files) - set(MODEL_FILES)):
        allowed = ", ".join(MODEL_FILES)
        raise ConfigError(f"files: {unknown[0]!r} is not a small model file; allowed: {allowed}")
    if (total := sum(map(len, files.values()))) > MAX_FILES_BYTES:
        raise ConfigError(f"files: {_too_large(total)}")
    for name in NEEDED:
        _check_values(files[name], f"model.path: {source}: {name}")
    _check_vocabulary(files, source)
    return dict(files)


def _check_vocabulary(files: Mapping[str, bytes], source: str) -> None:
    """Refuse what is no JSON, and a tokenizer of another model: it has ids without an embedding."""
    try:
        size, highest = parse("vocabulary", [files[name] for name in NEEDED])
    except ParseError as error:
        name = " and ".join(NEEDED) if error.at is None else NEEDED[error.at]
        raise ConfigError(f"model.path: {source}: {name} {error.message}") from None
    if size is not None and highest >= size:
        raise ConfigError(
            f"model.path: {source}: tokenizer.json has ids up to {highest}, but config.json says "
            f"vocab_size {size}: this is the tokenizer of another model"
        )


def _check_values(data: bytes, what: str) -> None:
    """Refuse more values than a vocabulary with its merges has, about a million: each is memory."""
    num_values = data.count(b",") + data.count(b"[") + data.count(b"{")
    if num_values > MAX_MODEL_VALUES:
        raise ConfigError(
            f"{what} has about {num_values} values; at most {MAX_MODEL_VALUES} are allowed"
        )


def _too_large(total: int) -> str:
    return f"the small model files have {total} bytes; at most {MAX_FILES_BYTES} are allowed"
