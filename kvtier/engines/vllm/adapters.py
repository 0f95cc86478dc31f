"""What a LoRA adapter of vLLM's is: a digest of the files that its workers load, and a stamp that changes with them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

from kvtier.engines.vllm.settings import from_modelscope
from kvtier.engines.weights import sample, weight_files
from kvtier.types import KvtierError

Stamp = tuple[tuple[str, int, int, int, int], ...]
"""Name, inode, size, and the times of the last write and change of each file."""


class Adapter(NamedTuple):
    """Files of an adapter as they were at one time."""

    stamp: Stamp
    digest: str


def read_adapter(lora_path: str) -> Adapter | None:
    """An adapter's files; None where nobody here can say what vLLM loads, or they change while they are read."""
    try:
        before = stamp_of(lora_path)
        digest = adapter_digest(lora_path)
        return Adapter(before, digest) if before and digest and stamp_of(lora_path) == before else None
    except (OSError, ValueError, KvtierError):  # gone, or half written
        return None


def stamp_of(lora_path: str) -> Stamp | None:
    """Changes whenever a file of an adapter is written or replaced; None where there is none here."""
    try:
        stats = [(path.name, path.stat()) for path in _files(lora_path)]
    except OSError:
        return None
    return tuple((name, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns) for name, at in stats) or None


def adapter_digest(lora_path: str) -> str | None:
    """Digest of an adapter's configuration and weights; None where nobody here can say what vLLM loads."""
    files = _files(lora_path)
    if not files:
        return None
    config, *weights = files
    said = [hashlib.sha256(config.read_bytes()).hexdigest()]
    return " ".join([*said, *(f"{path.name} {sample(path).hex()}" for path in weights)])


def _files(lora_path: str) -> list[Path]:
    """The configuration and the weights; none where one of the two is not here."""
    folder = _folder(lora_path)
    if folder is None or not folder.is_dir():
        return []
    config, weights = folder / "adapter_config.json", list(weight_files(folder))
    return [config, *weights] if weights and config.is_file() else []


def _folder(lora_path: str) -> Path | None:
    """Where vLLM's workers look for an adapter, as they find it.

    A hub's name is only followed offline: else they fetch what the hub has then, which need not be what is here now.
    """
    path = os.path.expanduser(lora_path) if lora_path.startswith("~") else lora_path  # noqa: PTH111 - vLLM's own rule
    if os.path.isabs(path) or lora_path.startswith("~") or Path(path).exists():  # noqa: PTH117
        return Path(path)
    from huggingface_hub import constants, snapshot_download  # noqa: PLC0415 - comes with vLLM

    if not constants.HF_HUB_OFFLINE or from_modelscope():
        return None
    try:
        return Path(snapshot_download(lora_path, local_files_only=True))
    except Exception:  # noqa: BLE001 - whatever the hub's client says
        return None
