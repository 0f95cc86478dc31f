"""vLLM's names that kvtier's adapters import, so that what needs no engine runs here; real engines run in test_vllm."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

NAMES: dict[str, dict[str, Any]] = {
    "vllm": {"__version__": "0.0"},
    "vllm.distributed.kv_transfer.kv_connector.v1.base": {
        name: type(name, (), {})
        for name in ("KVConnectorHandshakeMetadata", "KVConnectorMetadata", "KVConnectorWorkerMetadata")
    },
    "vllm.platforms": {"current_platform": None},
    "vllm.v1.kv_offload.base": dict.fromkeys(("LookupResult", "RequestOffloadingContext"), SimpleNamespace)
    | {"Medium": SimpleNamespace(STORAGE=None)},
    "vllm.v1.kv_offload.tiering.base": {"JobResult": SimpleNamespace, "SecondaryTierManager": object},
    "vllm.v1.core.kv_cache_utils": {
        "generate_block_hash_extra_keys": lambda request, *_: (
            (request.lora_request.lora_name,) if request.lora_request else (),
            0,
        )
    },
}


@contextmanager
def adapters(*names: str) -> Iterator[SimpleNamespace]:
    """Modules of kvtier.engines.vllm, imported beside these names and forgotten afterwards."""
    before = dict(sys.modules)
    for path, members in NAMES.items():
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:depth]), ModuleType(parts[depth - 1]))
        vars(sys.modules[path]).update(members)
    try:
        yield SimpleNamespace(**{name: importlib.import_module(f"kvtier.engines.vllm.{name}") for name in names})
    finally:
        for name in set(sys.modules) - set(before):
            if name.split(".")[0] == "vllm" or name.startswith("kvtier.engines.vllm."):
                del sys.modules[name]


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
        parallel_config=SimpleNamespace(tensor_parallel_size=1, rank=0),
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
    )  # fmt: skip


def paged(heads: int, cell_bytes: int, blocks: int, page_tokens: int) -> SimpleNamespace:
    """One layer of full attention in so many blocks."""
    spec = type("FullAttentionSpec", (), {})()
    vars(spec).update(block_size=page_tokens, num_states=1, num_heads=heads, state_content_size_bytes=cell_bytes)
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["layer"])
    return SimpleNamespace(kv_cache_groups=[group], kv_tp_replicas=1, num_blocks=blocks, kv_cache_layout="LBHNC")
