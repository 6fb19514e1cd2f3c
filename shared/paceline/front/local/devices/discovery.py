"""GPUs of this machine, as NVIDIA's driver lists them or as the environment describes them."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.front.local.devices.device import VISIBLE, Device, described
from paceline.platform.telemetry.logs import Log

DESCRIBED = "PACELINE_DEVICES"
"""Environment variable that describes the GPUs, instead of asking the driver."""
log = Log("devices")


def devices_here(environ: Mapping[str, str] | None = None) -> tuple[Device, ...]:
    """The GPUs that this process may give to others; none if there is no driver.

    `CUDA_VISIBLE_DEVICES` restricts them, in its order.

    Raises:
        ConfigError: `PACELINE_DEVICES` is no description of devices.
    """
    environ = os.environ if environ is None else environ
    text = environ.get(DESCRIBED)
    devices = described(text) if text else _of_driver()
    return tuple(visible_of(devices, environ.get(VISIBLE)))


def visible_of(devices: Sequence[Device], visible: str | None) -> Iterator[Device]:
    """Devices that a value of `CUDA_VISIBLE_DEVICES` names; all if it is not set.

    As CUDA does, it stops at the first name that is none: a number or the beginning of a UUID.
    """
    if visible is None:
        yield from devices
        return
    for name in (part.strip() for part in visible.split(",")):
        fits = (d for d in devices if name and _names(name, d))
        device = next(fits, None)
        if device is None:
            return
        yield device


def _names(name: str, device: Device) -> bool:
    if name.isdecimal():
        return int(name) == device.index
    return device.visible.startswith(name)


def _of_driver() -> tuple[Device, ...]:
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ModuleNotFoundError:
        return ()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:  # no driver, or one that does not answer
        log.debug("no GPUs", error=error)
        return ()
    try:
        devices = [device for n in range(nvml.nvmlDeviceGetCount()) for device in _gpu(nvml, n)]
    finally:
        nvml.nvmlShutdown()
    return tuple(replace(device, index=number) for number, device in enumerate(devices))


def _gpu(nvml: Any, index: int) -> Iterator[Device]:
    """A GPU, or its slices; nothing if it has fallen off the bus."""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        slices = list(_slices(nvml, handle))
        if not slices:
            yield _device(nvml, handle, index)
        for part in slices:
            yield _device(nvml, part, index, is_slice=True)
    except nvml.NVMLError as error:
        log.warning("a GPU does not answer", gpu=index, error=error)


def _slices(nvml: Any, handle: Any) -> Iterator[Any]:
    try:
        enabled = nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE
        most = nvml.nvmlDeviceGetMaxMigDeviceCount(handle) if enabled else 0
    except nvml.NVMLError:  # cards without MIG
        return
    for number in range(most):
        try:
            yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
        except nvml.NVMLError:  # a place without a slice
            continue


def _device(nvml: Any, handle: Any, index: int, *, is_slice: bool = False) -> Device:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return Device(
        index=index,
        visible=str(nvml.nvmlDeviceGetUUID(handle)),
        name=str(nvml.nvmlDeviceGetName(handle)).removeprefix("NVIDIA "),
        num_bytes=int(memory.total),
        used_bytes=int(memory.used),
        is_slice=is_slice,
    )
