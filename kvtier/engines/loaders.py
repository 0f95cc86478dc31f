"""What loaders of engines are told, as far as it changes the weights that they bring."""

from __future__ import annotations

import json
import os
from typing import Any, Final

SPEED: Final = frozenset({
    "enable_multithread_load", "num_threads", "enable_weights_track", "concurrency", "memory_limit", "distributed",
    "enable_gds", "max_file_bytes", "hash_num_threads", "verify_on_load",
})  # fmt: skip
"""Of a loader's extra configuration: how fast it is, and how its files lie."""
FROM_FILES: Final = frozenset({
    "auto", "safetensors", "pt", "npcache", "mistral", "fastsafetensors", "instanttensor", "sharded_state",
    "runai_streamer", "bitsandbytes", "gguf", "dummy",
})  # fmt: skip
"""Ways of loading of all engines that read the model's own folder; others bring weights from a place of their own."""


def way_of(load_format: Any) -> str:
    """The name of a way of loading, whether it is an engine's enumeration or what a user wrote."""
    return str(load_format).rpartition(".")[2].lower()


def switched_on(variable: str) -> bool:
    """Whether the environment says yes to an engine's switch."""
    return os.environ.get(variable, "").strip().lower() in {"1", "true"}


def changing(extra: Any) -> Any:
    """The rest of such a configuration, in one order; `extra`: as JSON, as vLLM's or SGLang's arguments have it."""
    said = json.loads(extra or "{}") if isinstance(extra, str) else extra or {}
    return (
        sorted((name, value) for name, value in said.items() if name not in SPEED) if isinstance(said, dict) else said
    )
