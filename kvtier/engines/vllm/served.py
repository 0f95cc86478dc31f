"""Which LoRA adapters a worker of vLLM's computes with: what their files were when it read them.

The scheduler's side sees an adapter's files when a request comes; vLLM's workers read them at other times: when an
adapter is added, loaded in place, or used again after it had to make room for others. Only they can say whether the KV
of a request is that of the files its keys were made of.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from kvtier.engines.vllm.adapters import Adapter, read_adapter, stamp_of

_log = logging.getLogger("kvtier.vllm")


class _Read:
    """What this process has read."""

    last: dict[str, Adapter] = {}  # noqa: RUF012 - of the process, as vLLM's classes are
    """By path: an adapter that is loaded in place is read again in every step."""
    digests: dict[object, str | None] = {}  # noqa: RUF012
    """By number, and by name and path; None for ever where it was read twice and differed, or nobody knows."""


def watch() -> None:
    """Note from now on what is read; where this vLLM reads otherwise, nothing is known, and so nothing shared."""
    from vllm.lora.worker_manager import WorkerLoRAManager  # noqa: PLC0415 - only where LoRA is used

    method = getattr(WorkerLoRAManager, "_load_adapter", None)
    if method is not None and not hasattr(method, "kvtier"):
        WorkerLoRAManager._load_adapter = _noted(method)  # noqa: SLF001


def known(number: int) -> bool:
    """Whether the adapter of this number was read, by vLLM's numbers."""
    return number in _Read.digests


def serves(number: int, digest: str) -> bool:
    """Whether all KV that this process has computed with an adapter's number is of files of one digest, and of this."""
    return _Read.digests.get(number) == digest


def _noted(method: Any) -> Any:
    """The method that reads an adapter, with what it read noted."""

    @functools.wraps(method)
    def noted(manager: Any, lora: Any) -> Any:
        before = _read(lora.lora_path)
        try:
            return method(manager, lora)
        finally:
            same = before is not None and stamp_of(lora.lora_path) == before.stamp
            _note(lora, before.digest if before is not None and same else None)

    noted.kvtier = True  # type: ignore[attr-defined]
    return noted


def _read(path: str) -> Adapter | None:
    """An adapter's files as they are now."""
    last = _Read.last.get(path)
    if last is None or last.stamp != stamp_of(path):
        last = read_adapter(path)
        if last is not None:
            _Read.last[path] = last
    return last


def _note(lora: Any, digest: str | None) -> None:
    """An adapter has been read.

    vLLM's own prefix cache goes by name and path, and keeps blocks of what they were: once two readings differ, blocks
    of both may be in one request. And requests that run while an adapter is loaded in place go on with its number.
    """
    keys = (lora.lora_int_id, (lora.lora_name, lora.lora_path))
    before = {_Read.digests[key] for key in keys if key in _Read.digests}
    if before - {digest}:
        _log.warning("requests with LoRA %s are not cached any more: its weights changed", lora.lora_name)
    for key in keys:
        _Read.digests[key] = digest if not before - {digest} else None
