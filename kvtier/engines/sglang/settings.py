"""What of SGLang's configuration names the weights that it computes with, and what keeps their KV from being shared."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from sglang.srt.configs.model_config import is_audio_model, is_multimodal_model
from sglang.srt.runtime_context import get_device, get_exec, get_lora, get_model, get_spec

from kvtier.engines.dynamic import rope_kind
from kvtier.engines.loaders import FROM_FILES, changing, switched_on, way_of
from kvtier.engines.weights import config_of, local_weights, weights_digest
from kvtier.types import KvtierError, bad

MODEL: Final = (
    "quantization", "load_format", "dtype", "json_model_override_args", "quantization_param_path", "model_impl",
    "model_config_parser", "decrypted_config_file", "decrypted_draft_config_file", "modelopt_quant",
    "modelopt_checkpoint_restore_path", "quantize_and_serve", "rl_quant_profile", "qsa_indexer_dtype",
)  # fmt: skip
SPEC: Final = (
    "speculative_algorithm", "speculative_draft_model_quantization", "speculative_draft_load_format",
    "speculative_draft_kv_cache_dtype", "uno_lora_path",
)  # fmt: skip
EXEC: Final = {
    "moe": ("kt_weight_path", "kt_method", "kt_num_gpu_experts"),
    "mamba": ("mamba_ssm_dtype", "enable_int8_mamba_checkpoint", "enable_mamba_cache_stochastic_rounding"),
}
HERE: Final = FROM_FILES | {"presharded", "layered", "flash_rl"}
"""Ways of loading that read the model's own folder."""
MEDIA: Final = frozenset({
    "audio_config", "audio_token_id", "image_token_id", "image_token_index", "video_token_id", "vision_config",
})  # fmt: skip


def refuse(said: str, media: str) -> None:
    """Raise bad_request for engines whose page hashes do not say what their KV is of.

    `said`, `media`: of the extra configuration.
    """
    if get_lora().enable_lora:
        raise bad("enable_lora", "off: page hashes do not say which weights an adapter has")
    if get_exec().dllm.dllm_algorithm is not None:
        raise bad("dllm_algorithm", "none: KV of diffused tokens depends on those after them")
    if not _named(said):  # else there may be no configuration on this host, and who names the pages knows them
        _refuse_media(media)


def _refuse_media(media: str) -> None:
    """Raise bad_request for a model that takes images or sound: SGLang's page hashes know 30 bits of each.

    Among some ten thousand images two are likely to be alike then. The operator may say that no request brings any.
    """
    if media == "never":
        return
    settings = _configuration()
    classes = settings.get("architectures") or []
    found = sorted(MEDIA & {name for name, value in _fields(settings) if value is not None})
    if not found and (is_multimodal_model(classes) or is_audio_model(classes)):
        found = classes
    if found:
        raise bad("media", "never, if no request brings images or sound: page hashes know 30 bits of each", found)


def fingerprint(said: str) -> bytes:
    """Digest of weights and settings; `fingerprint` in the extra configuration replaces or sharpens it."""
    model, spec, execution = get_model(), get_spec(), get_exec()
    settings = [getattr(model, name) for name in MODEL] + [getattr(spec, name) for name in SPEC]
    settings += [getattr(getattr(execution, part), name) for part, names in EXEC.items() for name in names]
    settings.append(changing(model.model_loader_extra_config))
    if str(model.load_format).endswith("dummy"):
        settings.append(get_device().random_seed)
    draft = spec.speculative_draft_model_path
    if draft:
        revision = spec.speculative_draft_model_revision
        beside = config_of(_local(draft, revision))
        settings.append(weights_digest(_downloaded(draft, revision), beside, exact=said == "exact").hex())
    config = _configuration(needed=not _named(said))
    if model.context_length is not None and (not config or rope_kind(config)):
        settings.append(model.context_length)  # the longest sequence, by which such a rope's factors are chosen
    if _named(said):  # whoever shares them may have their configuration here, or not
        return hashlib.sha256(json.dumps([said, [str(each) for each in settings]]).encode()).digest()
    if way_of(model.load_format) not in HERE:
        raise bad("load_format", "one that reads the model's files, or `fingerprint` in the configuration")
    folder = _downloaded(model.model_path, model.revision)
    return weights_digest(folder, config, *settings, config.get("architectures"), exact=said == "exact")


def _named(said: str) -> bool:
    """Whether the operator says what the weights are."""
    return said not in {"", "sample", "exact"}


def _configuration(*, needed: bool = True) -> dict[str, Any]:
    """The model's configuration after what was said to override it; empty where it is neither here nor needed."""
    model = get_model()
    overrides: dict[str, Any] = json.loads(model.json_model_override_args or "{}")
    try:
        return config_of(_local(model.model_path, model.revision)) | overrides
    except KvtierError:
        if needed:
            raise
        return {}


def _downloaded(model: str, revision: str | None) -> str:
    """Where SGLang has a model's weights from: its download folder, if they are there."""
    with contextlib.suppress(KvtierError):
        return _local(model, revision, get_model().download_dir)
    return _local(model, revision)


def _local(model: str, revision: str | None, where: str | None = None) -> str:
    """A model's folder; without `where` that which SGLang has configurations from, whatever its download folder is."""
    return local_weights(model, revision, where, modelscope=switched_on("SGLANG_USE_MODELSCOPE"))


def _fields(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names and values of a configuration and of those within it, where models of models have theirs."""
    for name, value in settings.items():
        yield name, value
        if isinstance(value, Mapping):
            yield from _fields(value)
