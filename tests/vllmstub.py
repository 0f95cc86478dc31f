"""vLLM's names that kvtier's adapters import, so that what needs no engine runs here; real engines run in test_vllm."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

NAMES: dict[str, dict[str, Any]] = {
    "vllm": {"__version__": "0.0"},
    "vllm.distributed.kv_transfer.kv_connector.v1.base": {
        name: type(name, (), {"__init__": lambda *_: None} if name == "KVConnectorBase_V1" else {})
        for name in (
            "KVConnectorHandshakeMetadata",
            "KVConnectorMetadata",
            "KVConnectorWorkerMetadata",
            "KVConnectorBase_V1",
            "KVConnectorTransferResults",
            "SupportsHMA",
        )
    }
    | {"KVConnectorRole": Enum("KVConnectorRole", "SCHEDULER WORKER")},
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics": {"KVConnectorStats": object},
    "vllm.v1.metrics.cache_hit_source": {"CacheHitSource": Enum("CacheHitSource", "DEVICE HOST P2P DISK")},
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler": {},
    "vllm.lora.worker_manager": {},
    "vllm.model_executor.model_loader": {"get_model_cls": lambda config: config.model_class},
    "vllm.model_executor.models.utils": {},
    "vllm.platforms": {"current_platform": None},
    "vllm.v1.engine.core": {},
    "vllm.v1.worker.gpu_worker": {},
    "vllm.v1.kv_offload.base": dict.fromkeys(("LookupResult", "RequestOffloadingContext"), SimpleNamespace)
    | {"Medium": SimpleNamespace(STORAGE=None)},
    "vllm.v1.core.kv_cache_utils": {},
    "vllm.v1.kv_offload.tiering.base": {"JobResult": SimpleNamespace, "SecondaryTierManager": object},
}


def extra_keys(request: Any, begin: int, end: int, first: int) -> tuple[tuple[Any, ...], int]:
    """What vLLM's prefix cache knows of a block beside its tokens."""
    lora, items = request.lora_request, request.mm_features
    found = [("lora", lora.lora_name, lora.lora_path)] if lora else []
    for each in items:
        at = each.mm_position
        if at.offset < end and begin < at.offset + at.length:
            found.append(("mm", each.identifier, at.offset - begin))
    return tuple(found), first


class Context:
    """What vLLM tells a secondary tier of a request: here, that each block of 16 tokens has a key."""

    def __init__(self, request: Any) -> None:
        self.req_id = request.request_id
        self._states: dict[type, Any] = {}

    def set_state(self, value: Any) -> None:
        self._states[type(value)] = value

    def get_state(self, kind: type) -> Any:
        return self._states.get(kind)

    def get_offload_key_position(self, key: bytes) -> int:
        return 16 * (key[0] + 1)


@contextmanager
def adapters(*names: str) -> Iterator[SimpleNamespace]:
    """Modules of kvtier.engines.vllm, imported beside these names and forgotten afterwards."""
    before = dict(sys.modules)
    for path, members in NAMES.items():
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[:depth])
            sys.modules.setdefault(name, ModuleType(name))
        vars(sys.modules[path]).update(members)
    sys.modules["vllm.v1.core.kv_cache_utils"].generate_block_hash_extra_keys = extra_keys
    manager = type("WorkerLoRAManager", (), {"_load_adapter": lambda *_: None})
    sys.modules["vllm.lora.worker_manager"].WorkerLoRAManager = manager
    for path, name, does in (
        ("vllm.model_executor.models.utils", "AutoWeightsLoader", "load_weights"),
        ("vllm.v1.worker.gpu_worker", "Worker", "update_weights"),
        ("vllm.v1.engine.core", "EngineCore", "collective_rpc"),
    ):
        setattr(sys.modules[path], name, type(name, (), {does: lambda *_: None}))
    offloading = sys.modules["vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler"]
    offloading._create_req_context = Context
    try:
        yield SimpleNamespace(**{name: importlib.import_module(f"kvtier.engines.vllm.{name}") for name in names})
    finally:
        for name in set(sys.modules) - set(before):
            if name.split(".")[0] == "vllm" or name.startswith("kvtier.engines.vllm"):
                del sys.modules[name]


def item(name: str, begin: int = 0, tokens: int = 4, pixels: Any = 0, *, key: str = "") -> SimpleNamespace:
    """An image of a request's, by the name that vLLM or a client gave it."""
    field = SimpleNamespace(dim=0)
    data = {"pixel_values": SimpleNamespace(data=pixels, field=field)}
    place = SimpleNamespace(offset=begin, length=tokens, is_embed=None)
    return SimpleNamespace(mm_hash=name, identifier=key or name, modality="image", data=data, mm_position=place)


@dataclass
class Request:
    """A request of vLLM's, as far as the scheduler's side of the connector looks at it."""

    request_id: str
    all_token_ids: list[int]
    max_tokens: int = 8
    num_output_tokens: int = 0
    resumable: bool = False
    lora_request: Any = None
    cache_salt: str | None = None
    mm_features: Any = ()
    prompt_embeds: Any = None

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


def step(**scheduled: int) -> SimpleNamespace:
    """A step of vLLM's that computes so many tokens of new requests, whose blocks are 1, 2, 3..."""
    new = [SimpleNamespace(req_id=name, num_computed_tokens=0, block_ids=([],)) for name in scheduled]
    return SimpleNamespace(
        total_num_scheduled_tokens=sum(scheduled.values()), num_scheduled_tokens=scheduled, scheduled_new_reqs=new,
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[], new_block_ids=[]),
        scheduled_spec_decode_tokens={},
        kv_connector_block_state=SimpleNamespace(get_block_ids=lambda _: (list(range(1, 65)),)),
    )  # fmt: skip


def config(folder: Path, **more: Any) -> SimpleNamespace:
    """What a vLLM engine is configured with, as far as the adapters look at it."""
    return SimpleNamespace(
        model_config=model(folder), load_config=SimpleNamespace(load_format="auto"), kv_transfer_config=None,
        parallel_config=SimpleNamespace(tensor_parallel_size=1, rank=0, world_size=1),
        cache_config=SimpleNamespace(cache_dtype="auto", enable_prefix_caching=True),
        compilation_config=SimpleNamespace(static_forward_context={}), **more,
    )  # fmt: skip


def model(folder: Path, **media: Any) -> SimpleNamespace:
    """The model of such a configuration; it takes images where `media` says what is done with them."""
    settings = {"language_model_only": False, "mm_processor_cache_gb": 4, **media} if media else None
    return SimpleNamespace(
        model=str(folder), revision=None, quantization=None, dtype="float32", max_model_len=64, seed=0,
        hf_config=SimpleNamespace(to_dict=dict, to_json_string=lambda: "{}"),
        multimodal_config=settings and SimpleNamespace(**settings),
        model_class=type("Model", (), {"load_weights": lambda *_: None}),
    )  # fmt: skip


def paged(heads: int, cell_bytes: int, blocks: int, page_tokens: int) -> SimpleNamespace:
    """One layer of full attention in so many blocks."""
    spec = type("FullAttentionSpec", (), {})()
    vars(spec).update(block_size=page_tokens, num_states=1, num_heads=heads, state_content_size_bytes=cell_bytes)
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["layer"])
    return SimpleNamespace(kv_cache_groups=[group], kv_tp_replicas=1, num_blocks=blocks, kv_cache_layout="LBHNC")
