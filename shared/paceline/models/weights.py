"""Which files of a model are its weights, and whether they can be complete: safetensors only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath

from paceline.errors import ConfigError
from paceline.models.parsing import ParseError, parse

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_INDEX_BYTES = 32 << 20
WANTED = ("*.json", "*.jinja", "*.safetensors", "*.txt", "*.model")
"""Files of a repository or folder that are downloaded; none of them is code or a pickle."""
ADAPTER = "adapter_config.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
MAX_HEADER_BYTES = 4 << 20
"""Of a safetensors file: about 30,000 tensors. All files of a model may have eight times this."""
_MAX_HEADERS_BYTES = 8 * MAX_HEADER_BYTES


def check_no_adapter(folder: Path) -> None:
    """Check that transformers would load nothing but the model: of an adapter it asks peft to.

    Raises:
        ConfigError: the folder has an adapter, whose file says how peft loads it.
    """
    if (folder / ADAPTER).exists():
        raise ConfigError(
            f"model.path: {folder} has an {ADAPTER}; merge the adapter into the weights, or remove "
            "its files"
        )


def is_wanted(name: str) -> bool:
    """Whether a file at the top of a model's folder is downloaded."""
    return "/" not in name and any(PurePosixPath(name).match(each) for each in WANTED)


def check_weights(
    sizes: Mapping[str, int],
    read: Callable[[str], bytes],
    *,
    source: str,
    config: bytes = b"{}",
) -> list[str]:
    """Names of the files with weights. `read` reads a small file of the model.

    Raises:
        ConfigError: there are only pickles, or none, or a file that the index names is missing, or
            it names other layers than `config` (`config.json`) says.
    """
    if INDEX in sizes:
        return _listed(sizes, read, source, config)
    if WHOLE in sizes:
        return [WHOLE]
    pickles = sorted(name for name in sizes if name.endswith(_PICKLES))
    if pickles:
        raise ConfigError(
            f"model.path: {source} has its weights only as {pickles[0]}, a pickle, which can run "
            "code when it is loaded; convert it to safetensors (`save_pretrained` of transformers)"
        )
    raise ConfigError(f"model.path: {source} has neither {WHOLE} nor {INDEX}")


def _listed(
    sizes: Mapping[str, int], read: Callable[[str], bytes], source: str, config: bytes
) -> list[str]:
    if sizes[INDEX] > MAX_INDEX_BYTES:
        raise ConfigError(
            f"model.path: {source}: {INDEX} has {sizes[INDEX]} bytes; at most {MAX_INDEX_BYTES} "
            "are allowed"
        )
    try:
        names, problems = parse("names", [read(INDEX), config])
    except ParseError as error:
        raise ConfigError(f"model.path: {source}: {INDEX} is damaged: {error.message}") from None
    missing = [name for name in names if name not in sizes]
    if missing or not names:
        some = ", ".join(missing[:3]) or "any"
        raise ConfigError(
            f"model.path: {source} does not have {some}, of the {len(names)} files that {INDEX} "
            f"names; {len(missing)} are missing"
        )
    _refuse(problems, source)
    return names


def check_headers(paths: Sequence[Path], *, config: bytes = b"{}", index: bytes = b"{}") -> None:
    """Check that each file has the size that its header says, and together what is in `config`.

    `config` and `index` are the contents of `config.json` and of the index; empty objects: none.

    Raises:
        ConfigError: one is cut, or no safetensors file, or has a header that is too large; or
            layers or other tensors are missing or too many, or of another shape or type than a
            model of this configuration has.
        OSError: one cannot be read.
    """
    texts, sizes = list[bytes](), list[int]()
    for path in paths:
        text, size = _header(path)
        texts.append(text)
        sizes.append(size)
        if sum(map(len, texts)) > _MAX_HEADERS_BYTES:
            raise ConfigError(
                f"model.path: {path.parent}: the headers of its weights have more than "
                f"{_MAX_HEADERS_BYTES} bytes"
            )
    try:
        ends, problems = parse("headers", [config, index, *texts])
    except ParseError as error:
        path = paths[error.at] if error.at is not None else paths[0].parent
        raise ConfigError(f"model.path: {path} is no safetensors file: bad header") from None
    for path, text, size, end in zip(paths, texts, sizes, ends, strict=True):
        expected = 8 + len(text) + end
        if expected != size:
            raise ConfigError(
                f"model.path: {path} has {size} bytes; its header says {expected}, so it is damaged"
            )
    _refuse(problems, str(paths[0].parent) if paths else "")


def _refuse(problems: Sequence[str], source: str) -> None:
    """What the trainer would initialise at random, ignore, or not train."""
    if problems:
        raise ConfigError(f"model.path: {source}: {'; '.join(problems)}")


def _header(path: Path) -> tuple[bytes, int]:
    """The header of a safetensors file as text, and the size of the file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= size - 8:
            raise ConfigError(f"model.path: {path} is no safetensors file, or is cut")
        if length > MAX_HEADER_BYTES:
            raise ConfigError(
                f"model.path: {path} has a header of {length} bytes; at most {MAX_HEADER_BYTES} "
                "are allowed; save the model in more files (max_shard_size)"
            )
        return file.read(length), size
