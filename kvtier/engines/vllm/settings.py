"""What of a vLLM engine's configuration changes its weights, or what is computed with them, beside files of weights."""

from __future__ import annotations

from typing import Any, Final

from kvtier.engines.loaders import FROM_FILES, changing, switched_on, way_of
from kvtier.types import bad

MODEL: Final = ("architectures", "model_impl", "model_class_overrides", "quantization_config")
ATTENTION: Final = (
    "indexer_kv_dtype", "indexer_sparse_logits", "use_prefill_query_quantization", "disable_flashinfer_q_quantization",
)  # fmt: skip
LORA: Final = (
    "target_modules", "enable_tower_connector_lora", "enable_mixed_moe_lora_format", "enable_moe_shared_loras",
)  # fmt: skip
"""What an adapter's files do not say of how they are applied."""
HERE: Final = FROM_FILES | {"hf", "runai_streamer_sharded"}
"""Ways of loading that read the model's own folder."""


def settings_of(vllm_config: Any) -> list[Any]:
    """Settings that tell engines of the same weights and configuration apart."""
    config, load = vllm_config.model_config, vllm_config.load_config
    attention = getattr(vllm_config, "attention_config", None)
    settings = [config.quantization, load.load_format, config.dtype]
    settings += [(name, getattr(config, name, None)) for name in MODEL]
    settings += [(name, getattr(attention, name, None)) for name in ATTENTION]
    settings.append(changing(getattr(load, "model_loader_extra_config", None)))
    lora = getattr(vllm_config, "lora_config", None)
    if lora is not None and str(lora.lora_dtype) not in {"auto", str(config.dtype)}:
        settings.append(lora.lora_dtype)
    said = {name: getattr(lora, name, None) for name in LORA}
    return [*settings, said] if any(said.values()) else settings


def refuse_elsewhere(load: Any) -> None:
    """Raise bad_request where weights are not those in the model's folder, which a digest of it would then not name."""
    way = way_of(load.load_format)
    if way not in HERE:
        raise bad("load_format", "one that reads the model's files, or `fingerprint` in kv_connector_extra_config", way)


def from_modelscope() -> bool:
    """Whether names of models and adapters are ModelScope's, whose files are not where the hub's are."""
    return switched_on("VLLM_USE_MODELSCOPE")
