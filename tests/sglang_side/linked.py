"""KvtierLinker on SGLang's own pools of KV, without an engine: what it is asked for in an engine, one by one."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

PAGE, SLOTS = 16, 256


class Linked:
    """Orders of engine.py's process."""

    def link(
        self, kind: str = "mha", dtype: str = "float32", config: dict[str, Any] | None = None, draft: bool = False,
        pp_size: int = 1,
    ) -> int:  # fmt: skip
        """A pool of SGLang's with a linker on it; its number."""
        from kvtier.engines.sglang.linker import KvtierLinker

        pool = _pool(kind, dtype)
        params = SimpleNamespace(
            page_size=PAGE, token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
            mtp_draft_device_pools=(pool,) if draft else (), sidecar_draft_device_pools=(), attn_cp_cache_group=None,
            attn_tp_cache_group=None, tp_cache_group=None, pp_size=pp_size, attn_cp_rank=0, attn_cp_size=1,
        )  # fmt: skip
        self.links = getattr(self, "links", [])
        self.links.append((KvtierLinker(None, params, components=set(), extra_config=config), pool))
        return len(self.links) - 1

    def offload(self, at: int, keys: list[str], pages: list[int], window: int = 0, seed: int = 0) -> bool:
        """Have pages of pseudorandom bytes stored; the last `window` of them in the sliding window's pool too."""
        linker, pool = self.links[at]
        _fill(pool, seed)
        assert linker.offload(_transfers(keys, pages, window))
        while not linker.num_completed_offloads():
            time.sleep(0.005)
        return linker.pop_completed_offload()

    def lookup(self, at: int, keys: list[str], window: int = 0) -> list[int]:
        """What can be restored of a prompt."""
        return self.links[at][0].lookup("r", _transfers(keys, None, window))

    def load(
        self, at: int, keys: list[str], pages: list[int], of: list[int], window: int = 0, seed: int = 0
    ) -> dict[str, Any]:
        """Load to pages of zeros; whether it did, and whether they are what pages `of` were and the others zeros."""
        import torch

        linker, pool = self.links[at]
        _fill(pool, seed)
        want = [_page(pool, of[-window:] if windowed else of, windowed) for windowed in _parts(pool)]
        _fill(pool, None)
        done = linker.load("r", _transfers(keys, pages, window))
        got = [_page(pool, pages[-window:] if windowed else pages, windowed) for windowed in _parts(pool)]
        right = all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
        sums = [int(buffer.view(torch.uint8).ne(0).sum()) for buffer in _buffers(pool)]
        there = sum(int(part.ne(0).sum()) for part in got)
        return {"done": done, "right": right, "alone": sum(sums) == there}

    def unlink(self) -> dict[str, Any]:
        """Let go of all."""
        for linker, _ in self.links:
            linker.reset()
            linker.close()
        self.links = []
        return {}


def _pool(kind: str, dtype: str) -> Any:
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    common = {"page_size": PAGE, "dtype": getattr(torch, dtype), "device": "cpu", "enable_memory_saver": False}
    heads = {"head_num": 4, "head_dim": 32}
    if kind == "mha":
        return MHATokenToKVPool(SLOTS, layer_num=3, **heads, **common)
    if kind == "mla":
        return MLATokenToKVPool(SLOTS, kv_lora_rank=32, qk_rope_head_dim=16, layer_num=3, **common)
    if kind == "swa":
        layers = {"swa_attention_layer_ids": [0, 2], "full_attention_layer_ids": [1]}
        return SWAKVPool(SLOTS, SLOTS, **layers, **heads, **common)
    return type("Strange", (MHATokenToKVPool,), {})(SLOTS, layer_num=3, **heads, **common)


def _parts(pool: Any) -> list[bool]:
    """Whether each pool of it is the sliding window's."""
    return [False, True] if hasattr(pool, "swa_kv_pool") else [False]


def _buffers(pool: Any, windowed: bool | None = None) -> list[Any]:
    """Its tensors."""
    if hasattr(pool, "swa_kv_pool"):
        both = {True: [pool.swa_kv_pool], False: [pool.full_kv_pool], None: [pool.full_kv_pool, pool.swa_kv_pool]}
        return [buffer for each in both[windowed] for buffer in _buffers(each)]
    return list(pool.kv_buffer) if hasattr(pool, "kv_buffer") else [*pool.k_buffer, *pool.v_buffer]


def _fill(pool: Any, seed: int | None) -> None:
    """Pseudorandom bytes without zeros, or zeros."""
    import torch

    generator = torch.Generator().manual_seed(seed or 0)
    for buffer in _buffers(pool):
        raw = buffer.view(torch.uint8)
        raw.copy_(torch.randint(1, 256, raw.shape, generator=generator, dtype=torch.uint8))
        if seed is None:
            raw.zero_()


def _page(pool: Any, pages: list[int], windowed: bool) -> Any:
    """The bytes of pages."""
    import torch

    slots = _slots(pages)
    return torch.cat([buffer[slots].view(torch.uint8).reshape(-1) for buffer in _buffers(pool, windowed)])


def _slots(pages: list[int]) -> Any:
    import torch

    return (torch.tensor(pages)[:, None] * PAGE + torch.arange(PAGE)).reshape(-1)


def _transfers(keys: list[str], pages: list[int] | None, window: int) -> list[Any]:
    """What SGLang asks for: the KV, and the sliding window's last pages where there is one."""
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

    def one(name: str, last: int, policy: Any) -> Any:
        slots = None if pages is None else _slots(pages[-last:])
        return PoolTransfer(PoolName(name), device_indices=slots, keys=keys[-last:], hit_policy=policy)

    found = [one("kv", len(keys), PoolHitPolicy.ALL_PAGES)]
    return found + ([one("swa", window, PoolHitPolicy.TRAILING_PAGES)] if window else [])
