"""An engine in this process: speaks verbs to a real Store over real tiers, and writes into the real arena."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvtier import wire
from kvtier.device.libcuda import LibCuda
from kvtier.identity import CacheSpec, GroupSpec, Slice, shape_of
from kvtier.store import Store
from kvtier.tiers.slab import ARENA_SHIFT, OFFSET_MASK
from kvtier.tiers.vram import DEVICE_ARENA
from kvtier.types import Code, Kind, KvtierError, Tier

FULL = GroupSpec(Kind.FULL, layers=2, heads=2, cell_bytes=1000)
WINDOW = GroupSpec(Kind.WINDOW, layers=1, heads=2, cell_bytes=500, window=5)
STATE = GroupSpec(Kind.STATE, layers=2, heads=1, cell_bytes=9000)


def spec(groups: tuple[GroupSpec, ...] = (FULL,), **more: Any) -> CacheSpec:
    """A small cache: pages of two tokens unless said otherwise."""
    fields = {"model": "m", "fingerprint": b"f" * 16, "kv_dtype": "bf16", "page_tokens": 2, "groups": groups}
    return CacheSpec(**(fields | more))


def tokens(*pages: int, page_tokens: int = 2) -> bytes:
    """Page keys of pages filled with one token each."""
    return b"".join(np.full(page_tokens, p, "<i4").tobytes() for p in pages)


def content(keys: bytes, group: int, nbytes: int) -> np.ndarray:
    """The bytes that belong under a path of page keys: any wrong answer differs."""
    seed = int.from_bytes(__import__("hashlib").sha256(keys + bytes([group])).digest()[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def read(address: int, size: int) -> bytes:
    """Bytes of a GPU."""
    return LibCuda().read(0, address, size)


def write(address: int, data: np.ndarray) -> None:
    """The same the other way."""
    from kvtier.device import cuda

    cuda.runtime.memcpy(address, data.ctypes.data, data.nbytes, cuda.runtime.memcpyDefault)


class Peer(NamedTuple):
    """Credentials of a process, as the server would give them."""

    uid: int = 0
    gid: int = 0
    pid: int = 1
    pidfd: int | None = None


class Engine:
    """One process of one instance."""

    def __init__(self, store: Store, name: str = "engine", pid: int = 1, scope: str = "", uid: int = 0) -> None:
        self.store = store
        self.events: list[wire.Message] = []
        hello = wire.Hello(wire.VERSION, name, scope, events=True)
        self.process, self.welcome, _ = store.join(hello, Peer(uid=uid, pid=pid), self.events.append)
        self.spec: CacheSpec | None = None
        self.mapped = False
        """Whether it maps the device's memory: it reads there, and computes there what there is room for."""
        self.fetched: list[tuple[int, np.ndarray]] = []
        self.patient = True
        """Whether it waits after each request until nothing moves to or from the device."""
        self.tag = b""
        """Goes before each path when its content is made, so that what must not be shared differs."""

    async def call(self, message: wire.Message) -> Any:
        """One verb; awaits it where it must wait. On the device where that is mapped and has room."""
        if self.mapped and isinstance(message, wire.Acquire | wire.Reserve):
            reply = await self._call(msgspec.structs.replace(message, device=True))
            if self.patient:
                await self.still()
            if isinstance(message, wire.Acquire) or reply.pages == message.pages:
                return reply
            if reply.reservation:
                await self._call(wire.Abort(reply.reservation))
        reply = await self._call(message)
        if self.mapped and self.patient:
            await self.still()
        return reply

    async def _call(self, message: wire.Message) -> Any:
        reply = self.store.verbs[type(message)](self.process, message)
        return await reply if inspect.isawaitable(reply) else reply

    async def map(self) -> None:
        """Map the device's memory as a client does."""
        instance = self.process.instance
        name, _, scope = instance.scope.partition(":")[2].partition(":")
        told, _ = await self.store.map_device(wire.MapDevice(instance.name, scope), Peer(uid=int(name)))
        token = self.device_bytes(told.size, 16).tobytes()
        await self.call(wire.UseDevice(token))
        self.mapped = True

    async def still(self) -> None:
        """Wait until nothing moves to or from the device."""
        assert self.store.parts.vram is not None
        await self.store.parts.vram.promote.settled()
        await self.store.parts.vram.demote.settled()

    def device_bytes(self, at: int, size: int) -> np.ndarray:
        """The device's memory: in place on the CPU; a copy of a GPU's, which `send_back` writes."""
        memory = self.store.parts.vram.carrier.shared.memory
        if hasattr(memory, "data"):
            return memory.data[at : at + size]
        out = np.frombuffer(bytearray(read(memory.address + at, size)), np.uint8)
        self.fetched.append((memory.address + at, out))
        return out

    def send_back(self) -> None:
        """Write what was changed of a GPU's memory."""
        for address, data in self.fetched:
            write(address, data)
        self.fetched.clear()

    async def open(self, cache: CacheSpec, slices: tuple[Slice, ...] = (), **more: Any) -> wire.Opened:
        """Open a cache; later calls are about it. Maps the device where there is one."""
        if self.store.parts.vram is not None and not self.mapped:
            try:
                await self.map()
            except KvtierError as exc:  # another scope has it
                assert exc.code is Code.FORBIDDEN
        self.spec = cache
        self.opened = await self.call(wire.Open(cache, slices=slices, **more))
        self.slices = slices
        return self.opened

    def bytes_at(self, offset: int, nbytes: int) -> np.ndarray:
        """Arena bytes as a client maps them."""
        at = offset & OFFSET_MASK
        if offset >> ARENA_SHIFT == DEVICE_ARENA:
            return self.device_bytes(at, nbytes)
        arena = self.store.parts.host.arenas(self.process.instance.scope)[offset >> ARENA_SHIFT]
        return arena.data[at : at + nbytes]

    def pieces(self, group: int, offsets: np.ndarray) -> list[np.ndarray]:
        """The item's slots as views, clipped to its bytes."""
        info = self.opened.groups[group]
        left, out = info.item_bytes, []
        for offset in offsets:
            size = min(left, info.slot_bytes)
            out.append(self.bytes_at(int(offset), size))
            left -= size
        return out

    async def match(self, keys: bytes, handle: int = 0) -> wire.Matched:
        """Match a path."""
        return await self.call(wire.Match(self.opened.cache, handle, keys))

    def write(self, keys: bytes, reserved: wire.Reserved) -> None:
        """Fill the reserved slots with what belongs there (this process's cells only)."""
        self.fetched.clear()
        for items in reserved.items:
            self.write_items(keys, items)
        self.send_back()

    def write_items(self, keys: bytes, items: wire.Items) -> None:
        """Fill one group's slots."""
        info = self.opened.groups[items.group]
        group = self.spec.groups[items.group]
        offsets = np.frombuffer(items.offsets, "<i8").reshape(items.count, info.slots_per_item)
        for n, row in enumerate(offsets):
            if row[0] < 0:
                continue
            stride = self.spec.stride
            path = keys[n * stride : (n + 1) * stride] if self.spec.keyed else keys[: (items.first + n + 1) * stride]
            data = content(self.tag + path, items.group, info.item_bytes)
            cells = np.zeros((group.layers, group.heads, group.cell_bytes), bool)
            part = self.slices[items.group] if self.slices else Slice(0, group.layers, 0, group.heads)
            cells[part.l0 : part.l1, part.h0 : part.h1] = True
            mask, at = cells.reshape(-1), 0
            for piece in self.pieces(items.group, row):
                mine = mask[at : at + piece.size]
                piece[mine] = data[at : at + piece.size][mine]
                at += piece.size

    async def reserve(self, keys: bytes, start: int = 0, **more: Any) -> wire.Reserved:
        """Reserve everything of a path from page `start` on."""
        matched = await self.match(keys)
        pages = len(keys) // self.spec.stride - start
        return await self.call(wire.Reserve(matched.handle, start, pages, **more))

    async def put(self, keys: bytes, start: int = 0, **more: Any) -> int:
        """Compute and store a path; returns the pages that were published."""
        reserved = await self.reserve(keys, start, **more)
        if not reserved.reservation:
            return 0
        self.write(keys, reserved)
        reply = await self.call(wire.Commit(reserved.reservation, start, reserved.pages))
        return reply.published

    async def put_keys(self, keys: bytes, group: int = 0, **more: Any) -> wire.Reserved:
        """Store keys of a keyed cache; what was reserved for them."""
        reserved = await self.call(wire.ReserveKeys(self.opened.cache, group, keys, **more))
        self.write(keys, reserved)
        await self.call(wire.Commit(reserved.reservation, 0, reserved.pages))
        return reserved

    async def get(self, keys: bytes, wait_ms: int = 5000) -> int:
        """Lease what matches, check every byte, release; returns the pages served."""
        matched = await self.match(keys)
        got = await self.call(wire.Acquire(matched.handle, wait_ms=wait_ms))
        for items in got.items:
            self.verify(keys, items)
        if got.lease:
            await self.call(wire.Release(got.lease))
        return got.pages

    def verify(self, keys: bytes, items: wire.Items) -> None:
        """Every item holds the bytes that belong under its path."""
        info = self.opened.groups[items.group]
        offsets = np.frombuffer(items.offsets, "<i8").reshape(items.count, info.slots_per_item)
        stride = self.spec.stride
        for n, row in enumerate(offsets):
            if row[0] < 0:
                assert self.spec.keyed, "a leased page without its bytes"
                continue
            path = keys[n * stride : (n + 1) * stride] if self.spec.keyed else keys[: (items.first + n + 1) * stride]
            found = np.concatenate(self.pieces(items.group, row))
            assert np.array_equal(found, content(self.tag + path, items.group, info.item_bytes)), "wrong KV"

    def leave(self, clean: bool = True) -> None:
        """Say bye, or die."""
        self.store.leave(self.process, clean)
        if not clean:
            self.store.gone(self.process)


def idle(store: Store) -> list[str]:
    """What is wrong with a store that nobody uses and nothing moves in."""
    wrong = store.parts.check()
    for cache in store.parts.caches.values():
        held = [n.refs for n in cache.index.walk() if n.refs]
        if held:
            wrong.append(f"cache {cache.number}: leases left: {held}")
        if cache.index.doomed:
            wrong.append(f"cache {cache.number}: doomed nodes left")
    pools = [(Tier.HOST, pool) for pool in store.parts.host.pools]
    if store.parts.vram is not None:
        pools += [(Tier.DEVICE, pool) for pool in store.parts.vram.tier.pools]
    for tier, pool in pools:
        for group, counts in enumerate(pool.counts()):
            named = sum(
                int((held != -1).sum())
                for cache in store.parts.caches.values()
                if cache.pools.get(tier) is pool
                for node in cache.index.walk()
                if (held := node.handles(tier, group)) is not None
            )
            if pool.used(group) != named * pool.shape.slots_per_item[group]:
                wrong.append(f"pool {pool.shape}: group {group} uses {pool.used(group)} slots for {named} items")
            busy = {state.name: n for state, n in counts.items() if n and state.name not in {"FREE", "CACHED"}}
            if busy:
                wrong.append(f"pool {pool.shape}: group {group} left {busy}")
    if store.parts.instances:
        wrong.append(f"instances left: {list(store.parts.instances)}")
    return wrong


__all__ = ["FULL", "STATE", "WINDOW", "Engine", "Peer", "content", "idle", "shape_of", "spec", "tokens"]
