"""Images and sound of vLLM's requests: whether it names them by what they are, and what turns them into tokens."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kvtier.types import bad

DIGEST: Final = re.compile(r"[0-9a-f]{64}([0-9a-f]{64})?")
"""How vLLM's hashers write what they make of an item."""
TURNING: Final = (
    "mm_processor_kwargs", "media_io_kwargs", "mm_device_do_normalize", "mm_encoder_attn_backend",
    "mm_encoder_attn_dtype", "video_pruning_rate", "video_pruning_method",
)  # fmt: skip
"""Settings that change what a model sees of an item, and that no hash of it has."""


def refuse_numbered(vllm_config: Any) -> None:
    """Raise bad_request where vLLM counts media instead of hashing them: each process begins at 1 again."""
    media = _settings(vllm_config.model_config)
    if media and not media.mm_processor_cache_gb and not vllm_config.cache_config.enable_prefix_caching:
        raise bad("mm_processor_cache_gb", "above 0, or prefix caching: without both vLLM does not hash media", 0)


def hashed(features: Sequence[Any]) -> bool:
    """Whether each item has a digest for a name; what clients call their items may be anything else tomorrow."""
    return all(DIGEST.fullmatch(each.mm_hash or each.identifier) for each in features)


def turning(config: Any, folder: Path | None) -> list[str]:
    """What of an engine's settings, and of the processor beside its weights, turns media into tokens."""
    media = _settings(config)
    if media is None:
        return []
    found = {name: getattr(media, name, None) for name in TURNING}
    files = sorted(folder.glob("*processor_config.json")) if folder is not None and folder.is_dir() else []
    digests = [f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files]
    return [json.dumps(found, sort_keys=True, default=str), *digests]


def _settings(config: Any) -> Any:
    """The multimodal configuration; None for a model that takes no media."""
    media = getattr(config, "multimodal_config", None)
    return None if media is None or media.language_model_only else media
