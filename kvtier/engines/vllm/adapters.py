"""What a LoRA adapter of vLLM's is: a digest of the files that its workers load."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from kvtier.engines.weights import sample, weight_files


def adapter_digest(lora_path: str) -> str | None:
    """Digest of an adapter's configuration and weights; None where nobody here can say what vLLM loads."""
    folder = _folder(lora_path)
    if folder is None or not folder.is_dir():
        return None
    config, files = folder / "adapter_config.json", list(weight_files(folder))
    if not files or not config.is_file():
        return None
    said = [hashlib.sha256(config.read_bytes()).hexdigest()]
    return " ".join([*said, *(f"{path.name} {sample(path).hex()}" for path in files)])


def _folder(lora_path: str) -> Path | None:
    """Where vLLM's workers look for an adapter, as they find it.

    A hub's name is only followed offline: else they fetch what the hub has then, which need not be what is here now.
    """
    path = os.path.expanduser(lora_path) if lora_path.startswith("~") else lora_path  # noqa: PTH111 - vLLM's own rule
    if os.path.isabs(path) or lora_path.startswith("~") or Path(path).exists():  # noqa: PTH117
        return Path(path)
    from huggingface_hub import constants, snapshot_download  # noqa: PLC0415 - comes with vLLM

    if not constants.HF_HUB_OFFLINE or os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in {"1", "true"}:
        return None
    try:
        return Path(snapshot_download(lora_path, local_files_only=True))
    except Exception:  # noqa: BLE001 - whatever the hub's client says
        return None
