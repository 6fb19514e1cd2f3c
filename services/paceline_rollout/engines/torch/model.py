"""A Hugging Face causal LM whose weights come from snapshots."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from paceline.errors import InvalidError
from paceline.models.families import max_positions
from paceline.models.foreign_code import of_model
from paceline.models.shallow import SERVED_LAYERS
from paceline.plugins import WeightSnapshot
from paceline.weights.names import CheckpointNames
from paceline_rollout.engines.torch.forward import ATTENTION, ForwardPasses
from paceline_rollout.engines.torch.packed import Packed
from paceline_rollout.engines.torch.probe import shares_prefixes
from paceline_rollout.engines.torch.weights import DTYPES, ModelTensors, Weights

# `no_init_weights` patches functions of torch for the whole process: two threads in it at once
# would leave them patched, and weights would never be initialised again.
_BUILD_LOCK = threading.Lock()


class TorchModel(ForwardPasses):
    """A model whose shape is in `config.json` and whose weights come from snapshots."""

    def __init__(
        self, *, model_dir: Path, dtype: str, max_context: int, device: str, packed: bool = True
    ) -> None:
        """Raises `InvalidError` for a model whose log-probs this engine would not compute."""
        config = read_config(model_dir)
        text: Any = config.get_text_config()
        check_layers(text)
        _check_positions(text, max_context)
        with _BUILD_LOCK:
            self._shares_prefixes = shares_prefixes(config, device)
        names = CheckpointNames(config)
        with _BUILD_LOCK, torch.device(device), no_init_weights():
            model: Any = AutoModelForCausalLM.from_config(
                config,
                dtype=DTYPES[dtype],
                attn_implementation=ATTENTION,
                trust_remote_code=False,
            )
        model.tie_weights()
        model.eval().requires_grad_(False)
        super().__init__(model, device)
        self._tensors = ModelTensors(model, Packed(model) if packed else None, names=names)
        self.vocab_size = int(text.vocab_size)
        self.token_bytes = _token_bytes(text, DTYPES[dtype].itemsize)

    @property
    def shares_prefixes(self) -> bool:
        """Whether requests can read the keys and values of a common prefix in one place."""
        return self._shares_prefixes

    def parameters(self) -> Iterator[Tensor]:
        """The parameters of the model."""
        yield from self._model.parameters()

    def prepare(self, snapshot: WeightSnapshot, *, pack: bool = True) -> Weights:
        """Prepare a snapshot for `exchange`; see `ModelTensors.prepare`."""
        return self._tensors.prepare(snapshot, pack=pack)

    def unequal(self, snapshot: WeightSnapshot) -> list[str]:
        """Which tensors are others; see `ModelTensors.unequal`."""
        return self._tensors.unequal(snapshot)

    def exchange(self, weights: Weights) -> None:
        """Replace the weights; see `ModelTensors.exchange`."""
        self._tensors.exchange(weights)


def read_config(folder: Path) -> Any:
    """The configuration in a folder; raises `InvalidError` for one that transformers refuses."""
    with of_model("model.path: config.json"):
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _token_bytes(text: Any, item: int) -> int:
    """Bytes of KV cache per token."""
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * item * int(text.num_hidden_layers) * int(heads) * int(size)


def check_layers(text: Any) -> None:
    """Raise `InvalidError` for kinds of layers that this engine lacks."""
    kinds = set(getattr(text, "layer_types", None) or {"full_attention"})
    if kinds - SERVED_LAYERS:
        unsupported = sorted(kinds - SERVED_LAYERS)[0]
        raise InvalidError(
            f"model: layers of type {unsupported!r}; allowed: {sorted(SERVED_LAYERS)}"
        )


def _check_positions(text: Any, max_context: int) -> None:
    most = max_positions(text.to_dict())
    if most is not None and most < max_context:
        raise InvalidError(
            f"sampling.max_context: {max_context}; allowed for this model: at most {most}"
        )
