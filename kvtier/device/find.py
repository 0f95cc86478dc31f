"""Which device there is. Importing this costs nothing; looking for a GPU imports cupy, a third of a second."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, NamedTuple

from kvtier.device.base import Device
from kvtier.device.host import HostDevice
from kvtier.types import Code, KvtierError


class Found(NamedTuple):
    """A device, and why it is the CPU where it is."""

    device: Device
    reason: str


def named_device(name: str) -> Device:
    """`cpu`, or `cuda:N`. Raises KvtierError(io) where there is no such GPU."""
    if name == "cpu":
        return HostDevice()
    found = open_device(int(name.removeprefix("cuda:")))
    if found.reason:
        raise KvtierError(Code.IO, found.reason)
    return found.device


def open_device(ordinal: int = 0) -> Found:
    """The GPU of that ordinal, or the CPU in its place where there is no cupy, no driver, or no GPU that opens."""
    if importlib.util.find_spec("cupy") is None:
        return Found(HostDevice(), "cupy is not installed (pip install 'kvtier[cuda12]' or 'kvtier[cuda13]')")
    try:
        cuda: Any = importlib.import_module("kvtier.device.cuda")
    except Exception as exc:  # noqa: BLE001 - libraries, numpy, or a home in which it cannot make its folder
        return Found(HostDevice(), f"cupy cannot be imported: {exc}")
    if why := cuda.missing():
        return Found(HostDevice(), f"cupy finds no CUDA driver or no GPU: {why}")
    try:
        return Found(cuda.CudaDevice(ordinal), "")
    except KvtierError as exc:
        return Found(HostDevice(), f"cupy cannot open the GPU: {exc.message}")
