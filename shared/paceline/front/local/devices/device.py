"""GPUs, and their description in words."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.errors import ConfigError
from paceline.platform.text import human_bytes

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Environment variable that names the GPUs that a process sees."""
MAX_DEVICES = 1024
_GIB = 1 << 30
_GROUP = re.compile(r"(?:(\d+)x)?(?:([A-Za-z][\w-]*):)?(\d+(?:\.\d+)?)GiB")


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU of this machine, or a MIG slice of one."""

    index: int
    """Its number, which job files and messages use."""
    visible: str
    """Its name in `CUDA_VISIBLE_DEVICES`."""
    name: str
    num_bytes: int
    used_bytes: int = 0
    """By other programs."""
    is_slice: bool = False
    """Whether it is a MIG slice of a GPU, which computes alone, never as one of several."""

    @property
    def free_bytes(self) -> int:
        """Bytes that a job may use."""
        return max(0, self.num_bytes - self.used_bytes)

    def __str__(self) -> str:
        return f"GPU {self.index}"


def described(text: str) -> tuple[Device, ...]:
    """The devices of a description: `8x80GiB`, `2xH100:80GiB+1xMIG:10GiB`, `none`.

    Raises:
        ConfigError: it is none.
    """
    devices: list[Device] = []
    for group in [] if text == "none" else text.split("+"):
        match = _GROUP.fullmatch(group)
        count = int(match[1] or 1) if match else 0
        if match is None or not 0 < len(devices) + count <= MAX_DEVICES:
            raise ConfigError(
                f"devices: {text!r}; write such as 8x80GiB, 2xH100:80GiB+1xMIG:10GiB or none, "
                f"with at most {MAX_DEVICES} in all"
            )
        name, num_bytes = match[2] or "GPU", int(float(match[3]) * _GIB)
        first = len(devices)
        devices += (
            Device(index, str(index), name, num_bytes, is_slice=name.startswith("MIG"))
            for index in range(first, first + count)
        )
    return tuple(devices)


def listed(devices: Iterable[Device]) -> str:
    """Names of devices for people: `GPU 0`, `GPUs 0, 1`; `the CPU` for none."""
    numbers = [str(device.index) for device in devices]
    if not numbers:
        return "the CPU"
    return f"GPU{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"


def summary(devices: Iterable[Device]) -> str:
    """The devices of a machine in words: `8 GPUs (H100, 80.0 GiB each)`."""
    kinds: dict[tuple[str, int], int] = {}
    for device in devices:
        key = (device.name, device.num_bytes)
        kinds[key] = kinds.get(key, 0) + 1
    parts = [
        f"{count} GPU{'s' if count > 1 else ''} ({name}, {human_bytes(size)}"
        f"{' each' if count > 1 else ''})"
        for (name, size), count in kinds.items()
    ]
    return " and ".join(parts) or "no GPU"
