"""Loads the policy: each rank reads only its rows of the files, one FSDP unit at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.initialization import no_init_weights
from transformers.utils.logging import disable_progress_bar

from paceline.config.sections.lora import LoraSpec
from paceline.errors import ConfigError, InvalidError
from paceline.models.foreign_code import of_model
from paceline.models.shallow import fill_with_noise, shallow, with_few_tokens
from paceline.models.weights import INDEX, WHOLE, check_no_adapter
from paceline.platform.server.phase_report import PhaseReport
from paceline.platform.telemetry.logs import Log
from paceline_trainer.ranks.distributed import RankGroup
from paceline_trainer.step.attention import NAME
from paceline_trainer.step.lora import add_adapters, is_adapter, plain_name
from paceline_trainer.step.model import PolicyModel, shard
from paceline_trainer.step.probe import layouts_of

_PIECE = 16 << 20  # bytes
log = Log("loading")


class WeightFiles:
    """The safetensors files of a model folder: which tensor is in which file."""

    def __init__(self, folder: Path, *, report: PhaseReport | None = None) -> None:
        """Reads names only. `report` is told of each piece of a tensor, in bytes of the model.

        Raises:
            ConfigError: a file is missing or damaged.
        """
        self._folder = folder
        self._report = report
        self._files = _names(folder)

    def serves(self, inner: nn.Module) -> bool:
        """Whether the files have every tensor of the model under its own name."""
        return all(any(n in self._files for n in names) for names, _ in _tensors(inner))

    def fill(self, inner: nn.Module, among: Iterable[Tensor], rank: int, world: int) -> None:
        """Read a rank's rows of parameters (dimension 0, as FSDP2 shards them), and buffers whole.

        Rows of other ranks stay as they are: memory that nobody touches is not occupied.

        Raises:
            ConfigError: a tensor has another shape than the model, or its file is damaged.
        """
        wanted = {id(each) for each in among}
        for names, value in _tensors(inner):
            if id(value) in wanted:
                name, *others = (each for each in names if each in self._files)
                shared = isinstance(value, nn.Parameter) and value.dim() > 0
                rows = _rows(len(value), rank, world) if shared else None
                self._read(name, value, rows)
                for other in others:
                    self._check_same(name, value, other, rows)

    @torch.no_grad()
    def _check_same(self, name: str, value: Tensor, other: str, rows: slice | None) -> None:
        """Files may have a tensor that is tied twice, but only as the same."""
        again = torch.empty_like(value)
        self._read(other, again, rows)
        part = slice(None) if rows is None else rows
        if not torch.equal(again[part], value[part]):
            raise ConfigError(
                f"model.path: {name} and {other} in {self._folder} differ, but config.json says "
                "that they are one (tie_word_embeddings)"
            )

    @torch.no_grad()
    def _read(self, name: str, value: Tensor, rows: slice | None) -> None:
        path = self._folder / self._files[name]
        try:
            # Opened for each tensor, as the pages of an open file count as the process's memory.
            with safe_open(str(path), framework="pt") as file:  # pyright: ignore[reportCallIssue]
                found: Any = file.get_slice(name)
                shape = tuple(found.get_shape())
                if shape != tuple(value.shape):
                    raise ConfigError(
                        f"model.path: {name} in {path} has shape {shape}; the configuration says "
                        f"{tuple(value.shape)}"
                    )
                for at in _pieces(value, rows):
                    part = value.data if at is None else value.data[at]
                    part.copy_(file.get_tensor(name) if at is None else found[at])
                    if self._report is not None:
                        self._report.add(part.nbytes)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"model.path: cannot read {path}: {error}") from None


def open_policy(
    path: str,
    *,
    gradient_checkpointing: bool = False,
    lora: LoraSpec | None = None,
    report: PhaseReport | None = None,
) -> PolicyModel:
    """The model in float32 without its weights, which `shard` reads; layouts are detected.

    Models whose files have other names for their tensors are loaded as a whole. With `lora`, only
    its adapters are trained. `report` is told of bytes as they are read.

    Raises:
        ConfigError: the folder has no model that can be loaded.
        InvalidError: the trainer's log-probs differ from those of the model itself.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.path: {path} is not a folder with a config.json")
    disable_progress_bar()
    try:
        config = read_config(folder)
        files = WeightFiles(folder, report=report)
        with of_model(f"model type {config.model_type!r}: this trainer cannot train it"):
            inner = _build(config)
        if files.serves(inner):
            files.fill(inner, inner.buffers(), 0, 1)
            layouts, source = layouts_of(_example(files, config)), partial(files.fill, inner)
        else:
            check_no_adapter(folder)
            log.info("weights are converted: every rank loads the whole model", path=path)
            if report is not None:
                fetch(folder, report)
            inner = _converted(path, config)
            layouts, source = layouts_of(PolicyModel(_prepared(inner))), None
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: cannot read {path}: {error}") from None
    if lora is not None:
        add_adapters(inner, lora)
    policy = PolicyModel(_prepared(inner), source=source)
    policy.layouts = layouts
    if gradient_checkpointing:
        # transformers 5 has renamed it.
        old, new = "gradient_checkpointing_enable", "activation_checkpointing_enable"
        enable = getattr(inner, new, None) or getattr(inner, old)
        enable({"use_reentrant": False})
    policy.train()
    return policy


def read_config(folder: Path) -> Any:
    """The configuration that models are trained with.

    Raises:
        InvalidError: transformers refuses `config.json`.
    """
    with of_model("model.path: config.json"):
        # Without this, transformers asks on stdin whether to run code that comes with the model.
        found = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return _without_dropout(found)


def check_family(config: Any) -> None:
    """Check a model of this configuration before there are weights, on its first layers.

    Raises:
        InvalidError: the trainer's log-probs would differ from those of the model itself.
    """
    with of_model(f"model type {config.model_type!r}: this trainer cannot train it"):
        inner = _build(with_few_tokens(config), initialised=True)
    with torch.no_grad():
        fill_with_noise(inner)
    layouts_of(PolicyModel(_prepared(inner)))


def _converted(path: str, config: Any) -> Any:
    """The model with all its weights, by the conversions of transformers.

    Raises:
        ConfigError: some are in no file, which would stay random.
    """
    what = f"model.path: {path} has other tensors than its config.json describes"
    with of_model(what, unless=(OSError, ValueError)):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=torch.float32,
            attn_implementation=NAME,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    inner, info = loaded
    if missing := sorted(info["missing_keys"]):
        others = sorted(info["unexpected_keys"])
        unused = f"; not used are {len(others)}, such as {others[0]}" if others else ""
        raise ConfigError(
            f"model.path: the safetensors files of {path} lack {len(missing)} tensors of the model "
            f"that config.json describes, such as {missing[0]}{unused}; save it with "
            "save_pretrained(...), without wrappers such as DistributedDataParallel"
        )
    return inner


def load_policy(path: str, *, gradient_checkpointing: bool = False) -> PolicyModel:
    """As `open_policy`, with all weights in this process."""
    policy = open_policy(path, gradient_checkpointing=gradient_checkpointing)
    policy.load(policy.parameters(), 0, 1)
    policy.source = None
    return policy


def load_reference(
    path: str, group: RankGroup, *, dtype: str, report: PhaseReport | None = None
) -> PolicyModel:
    """The job's initial model, sharded and frozen; `report` as for `open_policy`.

    Raises:
        ConfigError: the folder has no model that can be loaded.
        InvalidError: the trainer's log-probs differ from those of the model itself.
    """
    policy = open_policy(path, report=report)
    policy.requires_grad_(False)
    policy.eval()
    shard(policy, group, dtype=dtype)
    return policy


def _build(config: Any, *, initialised: bool = False) -> nn.Module:
    """The model with uninitialised parameters, which occupy no memory until they are filled."""
    try:
        with nullcontext() if initialised else no_init_weights():
            inner: Any = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=NAME, trust_remote_code=False
            )
    except KeyError as error:
        if error.args != (NAME,):  # not in the family's table of its own kinds of attention
            raise
        raise InvalidError(
            f"model type {config.model_type!r}: its attention is its own; this trainer cannot "
            "train it"
        ) from None
    inner.tie_weights()
    return inner


def _example(files: WeightFiles, config: Any) -> PolicyModel:
    """The model with its first layers only, whole: what `layouts_of` asks needs no more."""
    inner = _build(shallow(config))
    files.fill(inner, (*inner.parameters(), *inner.buffers()), 0, 1)
    return PolicyModel(_prepared(inner))


def _prepared(inner: Any) -> Any:
    """Without a cache, and without dropout whose rate is not in the configuration."""
    inner.config.use_cache = False
    for module in inner.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return inner


def _without_dropout(config: Any) -> Any:
    """Without dropout, whose rates each family names its own way, as copies of the model are."""
    for name, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            _without_dropout(value)
        elif isinstance(value, float) and "drop" in name:
            setattr(config, name, 0.0)
    return config


def _tensors(inner: nn.Module) -> list[tuple[list[str], Tensor]]:
    """Parameters and saved buffers with all of their names in files; tied ones have several."""
    found: dict[int, tuple[list[str], Tensor]] = {}
    for name, value in inner.state_dict(keep_vars=True).items():
        if not is_adapter(name):
            found.setdefault(id(value), ([], value))[0].append(plain_name(name))
    return list(found.values())


def _pieces(value: Tensor, rows: slice | None) -> list[slice | None]:
    """Rows to read at a time, so that a slow disk is seen to bring some; None: the whole tensor."""
    if rows is None:
        return [None]
    num = max(_PIECE // max(value[:1].nbytes, 1), 1)
    starts = range(rows.start, rows.stop, num)
    return [slice(start, min(start + num, rows.stop)) for start in starts]


def fetch(folder: Path, report: PhaseReport) -> None:
    """Read all files of weights once, as no library tells how far it is; the kernel keeps them."""
    files = sorted({folder / name for name in _names(folder).values()})
    total, done = sum(path.stat().st_size for path in files), 0
    for path in files:
        with path.open("rb", buffering=0) as file:
            while piece := file.read(_PIECE):
                done += len(piece)
                report.reached(done, total)


def _rows(num: int, rank: int, world: int) -> slice:
    """The rows of a rank, as `torch.chunk` divides them."""
    size = -(-num // world)
    return slice(min(rank * size, num), min((rank + 1) * size, num))


def _names(folder: Path) -> dict[str, str]:
    """The file of each tensor."""
    index, whole = folder / INDEX, folder / WHOLE
    try:
        if index.is_file():
            listed: dict[str, str] = json.loads(index.read_text())["weight_map"]
            outside = [each for each in listed.values() if Path(each).name != each]
            if outside:
                raise ConfigError(f"model.path: {index} names {outside[0]!r}, not a plain file")
            return listed
        if not whole.is_file():
            return {}
        with safe_open(str(whole), framework="pt") as file:  # pyright: ignore[reportCallIssue]
            return dict.fromkeys(file.keys(), WHOLE)
    except (SafetensorError, OSError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"model.path: cannot read {folder}: {error}") from None
