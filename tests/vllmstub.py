"""vLLM's names that kvtier's adapters import, so that what needs no engine runs here; real engines run in test_vllm."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
    "vllm.v1.core.kv_cache_utils": {"generate_block_hash_extra_keys": lambda *_: ((), 0)},
}


@contextmanager
def adapters(*names: str) -> Iterator[list[Any]]:
    """Modules of kvtier.engines.vllm, imported beside these names and forgotten afterwards."""
    before = dict(sys.modules)
    for path, members in NAMES.items():
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:depth]), ModuleType(parts[depth - 1]))
        vars(sys.modules[path]).update(members)
    try:
        yield [importlib.import_module(f"kvtier.engines.vllm.{name}") for name in names]
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
