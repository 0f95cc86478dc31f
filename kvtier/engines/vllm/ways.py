"""Which way pages are copied: by kernels where vLLM's KV is on a GPU that they reach, else by torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import torch

from kvtier.device.base import Device, Stream
from kvtier.device.find import open_device
from kvtier.device.host import HostDevice
from kvtier.device.paths import Paths
from kvtier.device.shuttle import Choose, Way
from kvtier.engines.vllm.copies import Copies
from kvtier.engines.vllm.kernels import KernelCopies
from kvtier.engines.vllm.planes import Plane
from kvtier.engines.vllm.torched import TorchCopies
from kvtier.identity import GroupSpec, Slice
from kvtier.paths import state_path
from kvtier.types import Code, KvtierError, bad

WAYS: Final = ("auto", "kernels", "torch")

_log = logging.getLogger("kvtier.vllm")


def copies_of(
    tensors: Sequence[Sequence[Any]], blocks: int, groups: Sequence[GroupSpec], parts: Sequence[Slice | None],
    copier: ThreadPoolExecutor, way: str = "auto",
) -> Copies:  # fmt: skip
    """The way for KV that lies so; `copier` is the thread that ends saves.

    Raises bad_request for KV of another shape than the groups say, and with `kernels` whatever keeps them from it.
    """
    if way not in WAYS:
        raise bad("kv_connector_extra_config.copy", ", ".join(WAYS), way)
    planes = [
        Plane(layers, blocks, group, part) for layers, group, part in zip(tensors, groups, parts, strict=True)
    ]  # whichever way it is
    if way == "kernels" or (way == "auto" and not planes[0].on_cpu):
        try:
            device, stream_of, choose = engine_device(tensors[0][0].device)
            return KernelCopies(device, stream_of, tensors, blocks, groups, parts, copier, choose)
        except Exception as exc:  # whatever a driver, a compiler or an installation says
            if way == "kernels":
                raise
            _log.warning("pages are copied by torch: %s", str(exc) or type(exc).__name__)
    return TorchCopies(planes)


def engine_device(where: Any) -> tuple[Device, Callable[[], Stream], Choose | Way]:
    """The device of vLLM's tensors, the stream that vLLM computes on now, and how pages go best. Raises io."""
    if where.type == "cpu":
        host = HostDevice()
        return host, host.stream, Way.STAGED
    if where.type != "cuda":
        raise KvtierError(Code.IO, f"no kernels for {where.type}")
    ordinal = where.index or 0
    found = open_device(ordinal)
    if found.reason:
        raise KvtierError(Code.IO, found.reason)
    device = found.device
    return device, lambda: device.adopt(torch.cuda.current_stream(ordinal).cuda_stream), Paths(device, state_path()).way
