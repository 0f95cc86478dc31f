"""A SGLang engine, or its storage alone, that does what it is told by JSON lines; runs in the venv that has SGLang.

Each line is {"do": name, ...} (engine_side/orders.py). `start` builds the engine, `storage` the
backend on a host pool of SGLang's without an engine.
"""

from __future__ import annotations

import json
import os
from typing import Any

from linked import Linked
from orders import serve

os.environ.update(TORCH_COMPILE_DISABLE="1", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")


class Engine(Linked):
    """One engine; each public method is a thing that can be told."""

    def start(
        self, model: str, config: dict[str, Any] | None = None, linker: dict[str, Any] | None = None, **options: Any
    ) -> dict[str, Any]:
        """Build the engine; `config` is --hicache-storage-backend-extra-config.

        `linker`: --unified-cache-external-linker-config.
        """
        import sglang

        defaults = {
            "device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch", "dtype": "float32",
            "disable_overlap_schedule": True, "disable_cuda_graph": True, "skip_tokenizer_init": True, "page_size": 16,
            "max_total_tokens": 2048, "log_level": "info",
        }  # fmt: skip
        if config is not None:
            defaults |= {
                "enable_hierarchical_cache": True, "hicache_ratio": 2.0, "hicache_io_backend": "direct",
                "hicache_mem_layout": "page_first_direct", "hicache_write_policy": "write_through",
                "hicache_storage_prefetch_policy": "wait_complete", "hicache_storage_backend": "dynamic",
                "hicache_storage_backend_extra_config": json.dumps(config),
            }  # fmt: skip
        if linker is not None:
            defaults |= {
                "enable_unified_cache_external_linker": True, "unified_cache_external_linker_backend": "dynamic",
                "unified_cache_external_linker_config": linker,
            }  # fmt: skip
        self.engine = sglang.Engine(model_path=model, **(defaults | options))
        return {}

    def generate(self, prompts: list[list[int]], tokens: int = 8, extra_key: str | None = None) -> list[dict[str, Any]]:
        """Greedy continuations with logprobs, and how many of the prompt's tokens came from the storage or a linker."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        params = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        out = []
        for prompt in prompts:
            ask = GenerateReqInput(input_ids=prompt, sampling_params=params, return_logprob=True, extra_key=extra_key)
            answers = self.engine.tokenizer_manager.generate_request(ask, None)
            got = self.engine.loop.run_until_complete(answers.__anext__())
            meta = got["meta_info"]
            out.append({
                "tokens": got["output_ids"],
                "logprobs": [each[0] for each in meta["output_token_logprobs"]],
                "cached": (meta["cached_tokens_details"] or {}).get("storage", 0),
                "linked": (meta["cached_tokens_details"] or {}).get("host", 0),
            })  # fmt: skip
        return out

    def flush(self) -> dict[str, Any]:
        """Forget SGLang's own cache, of the GPU and of the host."""
        return {"done": bool(self.engine.flush_cache())}

    def scale(self, model: str, by: float, flush: bool = True) -> dict[str, Any]:
        """Change weights in place: those of the first norm, to the file's times `by`."""
        import torch
        from safetensors import safe_open

        name = "model.layers.0.input_layernorm.weight"
        with safe_open(f"{model}/model.safetensors", "pt") as file:
            tensor = file.get_tensor(name) * torch.tensor(by)
        self.engine.begin_weight_update()
        done = self.engine.update_weights_from_tensor([(name, tensor)], flush_cache=flush)
        self.engine.end_weight_update()
        return {"done": str(done)}

    def stop(self) -> dict[str, Any]:
        """End the engine and its processes."""
        self.engine.shutdown()
        return {}

    # -- the storage alone ---------------------------------------------------------------------------------------

    def storage(self, model: str, config: dict[str, Any], args: dict[str, Any] | None = None) -> dict[str, Any]:
        """What SGLang's configuration says, without an engine."""
        from sglang.srt import runtime_context
        from sglang.srt.server_args import ServerArgs

        options = {"device": "cpu", "attention_backend": "torch_native", "dtype": "float32", "page_size": 16}
        runtime_context.publish(ServerArgs(model_path=model, **(options | (args or {}))), role="scheduler")
        self.config = config
        self.backends: list[Any] = []
        return {}

    def pool(
        self, layout: str = "page_first", heads: int = 4, mla: bool = False, dtype: str = "float32",
        ranks: dict[str, int] | None = None, name: str = "kv", **config: Any,
    ) -> int:  # fmt: skip
        """A host pool of SGLang's with a backend made by SGLang's factory; its number."""
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
        from sglang.srt.mem_cache.storage import StorageBackendFactory

        memory = _mla(layout, dtype) if mla else _mha(layout, heads, dtype)
        shard = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
        storage = HiCacheStorageConfig(
            **(shard | (ranks or {})), is_mla_model=mla, enable_storage_metrics=False,
            is_page_first_layout=layout == "page_first", model_name="tiny", extra_config=self.config | config,
        )  # fmt: skip
        backend = StorageBackendFactory.create_backend("dynamic", storage, memory)
        backend.register_mem_pool_host(memory)
        if name != "kv":
            backend.register_mem_host_pool_v2(memory, name)
        backend.on_host_pools_registered()
        self.backends.append((backend, memory))
        return len(self.backends) - 1

    def exists(self, at: int, keys: list[str]) -> int:
        return self.backends[at][0].batch_exists(keys)

    def set(self, at: int, keys: list[str], seed: int) -> list[bool]:
        """Store pages of pseudorandom bytes."""
        backend, memory = self.backends[at]
        slots = memory.alloc(len(keys) * memory.page_size)
        for first, data in zip(slots[:: memory.page_size], _pages(memory, len(keys), seed), strict=True):
            memory.set_from_flat_data_page(int(first), data)
        done = backend.batch_set_v1(keys, slots)
        memory.free(slots)
        return done

    def get(self, at: int, keys: list[str], seed: int) -> dict[str, Any]:
        """Load pages to slots of zeros; which of them have the bytes that `set` stored."""
        backend, memory = self.backends[at]
        memory.kv_buffer.zero_()
        slots = memory.alloc(len(keys) * memory.page_size)
        done = backend.batch_get_v1(keys, slots)
        found = [_raw(memory.get_data_page(first)) for first in slots[:: memory.page_size]]
        memory.free(slots)
        want = [_raw(data) for data in _pages(memory, len(keys), seed)]
        return {"done": done, "right": [a == b for a, b in zip(want, found, strict=True)]}

    def both(self, at: int, keys: list[str], name: str, policy: str, window: int) -> dict[str, Any]:
        """What `batch_exists_v2` says of the KV with a second pool."""
        from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

        transfer = PoolTransfer(PoolName(name), keys=keys[:window], hit_policy=PoolHitPolicy(policy))
        got = self.backends[at][0].batch_exists_v2(keys, [transfer])
        hits = {str(pool): pages for pool, pages in got.extra_pool_hit_pages.items()}
        return {"pages": got.kv_hit_pages, "hits": hits, "restorable": got.restorable_prefix_pages}

    def set_v2(self, at: int, keys: list[str], name: str) -> list[bool]:
        """Store pages of a second pool."""
        from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

        backend, memory = self.backends[at]
        slots = memory.alloc(len(keys) * memory.page_size)
        done = backend.batch_set_v2([PoolTransfer(PoolName(name), host_indices=slots, keys=keys)])
        memory.free(slots)
        return done[PoolName(name)]

    def clear(self, at: int) -> dict[str, Any]:
        self.backends[at][0].clear()
        return {}


def _mha(layout: str, heads: int, dtype: str) -> Any:
    import torch
    from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    kind = getattr(torch, dtype)
    sides = [[torch.zeros(64, heads, 32, dtype=kind) for _ in range(3)] for _ in "kv"]
    tables = [torch.tensor([each.data_ptr() for each in side], dtype=torch.uint64) for side in sides]
    buffers = KVBuffers(
        k=tuple(sides[0]), v=tuple(sides[1]), k_data_ptrs=tables[0], v_data_ptrs=tables[1], layout=KVBufferLayout.NHD
    )
    info = MHABufferInfo(
        buffers=buffers, page_size=16, head_num=heads, head_dim=32, v_head_dim=32, dtype=kind,
        device=torch.device("cpu"),
    )  # fmt: skip
    return MHATokenToKVPoolHost(
        info, 0, 0, 16, layout, pin_memory=False, device_capacity_tokens=64, start_layer=0, end_layer=3,
        host_token_capacity=1024,
    )  # fmt: skip


def _mla(layout: str, dtype: str) -> Any:
    import torch
    from sglang.srt.mem_cache.device_pool_info import MLABufferInfo
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    kind = getattr(torch, dtype)
    rows = tuple(torch.zeros(64, 1, 48, dtype=kind) for _ in range(3))
    info = MLABufferInfo(
        buffers=rows, data_ptrs=torch.tensor([each.data_ptr() for each in rows], dtype=torch.uint64),
        layer_indices=(0, 1, 2), device_layer_num=3, page_size=16, kv_lora_rank=32, qk_rope_head_dim=16,
        kv_cache_dim=48, dtype=kind, device=torch.device("cpu"),
    )  # fmt: skip
    return MLATokenToKVPoolHost(
        info, 0, 0, 16, layout, pin_memory=False, device_capacity_tokens=64, start_layer=0, end_layer=3,
        target_layer_num=3, host_token_capacity=1024,
    )  # fmt: skip


def _pages(memory: Any, count: int, seed: int) -> list[Any]:
    """Pages of pseudorandom bytes in the flat form that SGLang itself writes and reads."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(count):
        page = memory.get_dummy_flat_data_page()
        raw = page.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8))
        out.append(page)
    return out


def _raw(page: Any) -> bytes:
    import torch

    return bytes(page.contiguous().view(torch.uint8).numpy().data)


if __name__ == "__main__":
    serve(Engine())
