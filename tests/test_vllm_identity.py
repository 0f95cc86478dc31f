"""Which cache a vLLM engine's KV belongs to, and whose KV belongs to none: from configurations, without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvtier.identity import cache_id
from kvtier.types import KvtierError
from vllmstub import adapters, config, model, paged
from weightkit import safetensors

pytest.importorskip("torch")

BACKENDS = {"layer": "CPU_ATTN"}
ATTENTION = {
    "indexer_kv_dtype": "auto", "indexer_sparse_logits": False, "use_prefill_query_quantization": False,
    "disable_flashinfer_q_quantization": False,
}  # fmt: skip


@pytest.fixture
def vllm() -> Iterator[Any]:
    """The adapters' modules."""
    with adapters("formats", "tier") as modules:
        yield modules


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model."""
    return safetensors(tmp_path / "m" / "m.safetensors", {"a": np.ones((4, 8), "<f4")}).parent


@pytest.mark.parametrize(
    ("part", "name", "values"),
    [
        ("model_config", "quantization_config", [None, {"linear": "fp8"}, {"linear": "fp8", "ignore": ["lm_head"]}]),
        ("model_config", "architectures", [["LlamaForCausalLM"], ["LlamaBidirectionalModel"]]),
        ("model_config", "model_class_overrides", [{}, {"LlamaForCausalLM": "mine:Llama"}]),
        ("model_config", "model_impl", ["auto", "transformers"]),
        ("load_config", "model_loader_extra_config", [{}, {"pattern": "a-{rank}"}, {"pattern": "b-{rank}"}]),
        ("lora_config", "target_modules", [None, ["q_proj"], ["q_proj", "k_proj"]]),
        ("lora_config", "enable_tower_connector_lora", [False, True]),
        ("attention_config", "indexer_kv_dtype", ["auto", "fp8"]),
        ("attention_config", "use_prefill_query_quantization", [False, True]),
    ],
)
@pytest.mark.parametrize("said", ["sample", "weights of May"])
def test_every_setting_that_changes_what_is_computed_is_in_the_fingerprint(
    vllm: Any, folder: Path, part: str, name: str, values: list[Any], said: str
):
    """Of the same files: other online quantization, other classes, an adapter that is applied to other layers."""
    settings = config(folder, attention_config=SimpleNamespace(**ATTENTION))
    settings.lora_config = SimpleNamespace(lora_dtype="auto", target_modules=None, enable_tower_connector_lora=False)
    settings.kv_transfer_config = SimpleNamespace(kv_connector_extra_config={"fingerprint": said})
    found = set()
    for value in values:
        setattr(getattr(settings, part), name, value)
        found.add(vllm.formats.model_fingerprint(settings))
    assert len(found) == len(values)


def test_engines_that_differ_in_nothing_but_speed_share(vllm: Any, folder: Path):
    """Threads of the loader's; LoRA as it is by default, without an adapter."""
    settings = config(folder, attention_config=SimpleNamespace(**ATTENTION), lora_config=None)
    settings.load_config.model_loader_extra_config = {}
    want = vllm.formats.model_fingerprint(settings)
    settings.load_config.model_loader_extra_config = {"enable_multithread_load": True, "num_threads": 8}
    settings.lora_config = SimpleNamespace(lora_dtype="auto", target_modules=None, enable_tower_connector_lora=False)
    assert vllm.formats.model_fingerprint(settings) == want


@pytest.mark.parametrize("way", ["tensorizer", "modelexpress", "LoadFormat.IPC_CACHE", "a_plugin_of_mine"])
def test_weights_that_are_not_read_from_the_models_files_are_refused_unless_named(vllm: Any, folder: Path, way: str):
    """What lies in the folder says nothing of what a loader brings from elsewhere."""
    settings = config(folder)
    settings.load_config.load_format = way
    with pytest.raises(KvtierError, match="load_format"):
        vllm.formats.model_fingerprint(settings)
    settings.kv_transfer_config = SimpleNamespace(kv_connector_extra_config={"fingerprint": "weights of May"})
    assert vllm.formats.model_fingerprint(settings)


def test_weights_are_looked_up_where_vllm_downloads_them(
    vllm: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A cache of the hub's elsewhere may have another revision of the model; ModelScope's files are in neither."""
    asked = []
    hub = SimpleNamespace(snapshot_download=lambda *_, **more: asked.append(more["cache_dir"]) or folder)
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", hub)
    settings = config(tmp_path / "x")
    settings.model_config.model = "my/model"
    settings.load_config.download_dir = "/elsewhere"
    assert vllm.formats.model_fingerprint(settings)
    assert asked == ["/elsewhere"]
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    with pytest.raises(KvtierError, match="ModelScope"):
        vllm.formats.model_fingerprint(settings)


def test_processors_count_that_lie_elsewhere_than_the_weights(
    vllm: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """VLLM's download folder has weights alone."""
    beside = tmp_path / "beside"
    beside.mkdir()
    caches = {"/elsewhere": folder, None: beside}
    hub = SimpleNamespace(snapshot_download=lambda *_, **more: caches[more["cache_dir"]])
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", hub)
    settings, found = config(folder), set()
    settings.model_config = model(Path("my/model"), mm_processor_kwargs=None)
    settings.load_config.download_dir = "/elsewhere"
    for size in (100, 200):
        (beside / "preprocessor_config.json").write_text(f'{{"size": {size}}}')
        found.add(vllm.formats.model_fingerprint(settings))
    assert len(found) == 2


def test_layers_of_one_shape_are_told_apart(vllm: Any, folder: Path):
    """Groups with equally many layers of one size: which layers they are, their type, and who computes each."""
    settings, kv, found = config(folder), paged(2, 512, 8, 4), set()
    group = kv.kv_cache_groups[0]
    vars(group.kv_cache_spec).update(dtype="torch.float8_e4m3fn", kv_quant_mode=1)
    for names, dtype, backends in (
        (["a", "b"], "torch.float8_e4m3fn", {"a": "X", "b": "Y"}),
        (["a", "c"], "torch.float8_e4m3fn", {"a": "X", "c": "Y"}),
        (["a", "b"], "torch.int8", {"a": "X", "b": "Y"}),
        (["a", "b"], "torch.float8_e4m3fn", {"a": "Y", "b": "X"}),
    ):
        group.layer_names, group.kv_cache_spec.dtype = names, dtype
        found.add(cache_id(vllm.formats.spec_of(settings, kv, backends, "LBHNC"), "", 0))
    assert len(found) == 4


@pytest.mark.parametrize("what", ["pooling", "diffusion", "not causal", "rebuilt by vLLM", "not kept by prefix"])
def test_kv_that_is_no_prefixs_is_refused(vllm: Any, folder: Path, what: str):
    """A mean over all tokens is none over those after a hit; KV that depends on later tokens is not that of its own."""
    settings, kv = config(folder), paged(2, 512, 8, 4)
    group = kv.kv_cache_groups[0]
    assert vllm.formats.spec_of(settings, kv, BACKENDS, "LBHNC")
    if what == "pooling":
        settings.model_config.is_prefix_caching_supported = False
    elif what == "diffusion":
        settings.model_config.is_diffusion = True
    elif what == "not causal":
        group.kv_cache_spec.non_causal = True
    elif what == "rebuilt by vLLM":
        group.enable_kv_transfer = False
    else:
        group.kv_cache_spec.prefix_cacheable = False
    with pytest.raises(KvtierError):
        vllm.formats.spec_of(settings, kv, BACKENDS, "LBHNC")


@pytest.mark.parametrize("what", ["pooling", "prefixes"])
def test_the_tier_refuses_models_whose_prefixes_vllm_does_not_cache(vllm: Any, folder: Path, what: str):
    """Which it turns off itself where attention is not causal."""
    settings = config(folder)
    settings.model_config.is_prefix_caching_supported = what != "pooling"
    settings.cache_config.enable_prefix_caching = what != "prefixes"
    with pytest.raises(KvtierError, match=r"model|enable_prefix_caching"):
        vllm.tier.spec_of(SimpleNamespace(), settings, 4096)
