"""LoRA through peft: adapters beside the layers of the policy, which stay as they are."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

from torch import nn

from paceline.config.sections.lora import LoraSpec
from paceline.errors import ConfigError

ADAPTER = "default"
_BASE = ".base_layer"


def add_adapters(inner: nn.Module, spec: LoraSpec) -> None:
    """Add adapters to the layers that `spec` names; only they require gradients.

    They begin as zero: A is drawn from torch's random state, B is 0.

    Raises:
        ConfigError: the model has no such layers.
    """
    # Loaded only by jobs that use it, as it brings accelerate.
    from peft import LoraConfig, inject_adapter_in_model

    targets = list(spec.target_modules)
    config = LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,  # pyright: ignore[reportArgumentType]
        target_modules=targets[0] if targets == ["all-linear"] else targets,
        lora_dropout=0.0,
    )
    try:
        inject_adapter_in_model(config, inner, ADAPTER)
    except ValueError as error:
        raise ConfigError(f"trainer.lora.target_modules: {error}") from None
    head: Any = cast(Any, inner).get_output_embeddings()
    for name, each in _adapted(inner).items():
        if each is head or not isinstance(each.get_base_layer(), nn.Linear):
            raise ConfigError(
                f"trainer.lora.target_modules: {name} cannot have an adapter; allowed are linear "
                "layers but the head"
            )


def plain_name(name: str) -> str:
    """The name of a tensor of the policy as others know it: without what peft adds."""
    return name.replace(_BASE, "").replace(f".{ADAPTER}.", ".")


def is_adapter(name: str) -> bool:
    """Whether a tensor of this name belongs to an adapter."""
    return f".{ADAPTER}." in name


def scales(inner: nn.Module) -> dict[str, float]:
    """The factor of each adapter, by the name of its tensor B."""
    return {
        f"{name}.lora_B.{ADAPTER}.weight": float(each.scaling[ADAPTER])
        for name, each in _adapted(inner).items()
    }


@contextmanager
def without_adapters(inner: nn.Module) -> Generator[None]:
    """The model as it was before training, inside the context."""
    # peft's own switch also changes which parameters require gradients, which FSDP must not see.
    scalings = [(each.scaling, each.scaling[ADAPTER]) for each in _adapted(inner).values()]
    for scaling, _ in scalings:
        scaling[ADAPTER] = 0.0
    try:
        yield
    finally:
        for scaling, value in scalings:
            scaling[ADAPTER] = value


def _adapted(inner: nn.Module) -> dict[str, Any]:
    return {name: each for name, each in inner.named_modules() if hasattr(each, "lora_B")}
