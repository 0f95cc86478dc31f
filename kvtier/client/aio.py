"""The client for engines that live on an asyncio loop: the verbs of sync.py as coroutines."""

from __future__ import annotations

import asyncio
import os
import pathlib
import socket
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self, TypeVar

from kvtier import wire
from kvtier.client.asynclink import AsyncLink
from kvtier.client.caches import KeyPath, OpenCache, asking_stat, ordering, pinging
from kvtier.client.device import FENCE_S, MappedDevice, Reached
from kvtier.client.held import HeldLease, HeldReservation
from kvtier.client.layout import Bytes
from kvtier.client.link import FAULTS, Away, Given, Identity, Steps
from kvtier.client.moving import HeldRegion, Moving, Source, Stretches, Target, registering, registering_kv
from kvtier.client.putting import putting, slow_s
from kvtier.client.share import adopted
from kvtier.client.slots import Checks, Slots, Verify
from kvtier.client.whole import Numbers
from kvtier.identity import CacheSpec, Slice
from kvtier.paths import socket_path
from kvtier.types import KvtierError

T = TypeVar("T")


class AsyncClient:
    """One process of an engine instance, on one loop; see sync.Client, which this mirrors."""

    def __init__(
        self,
        path: str | pathlib.Path | None = None,
        *,
        instance: str | None = None,
        scope: str = "",
        timeout_s: float = 1.0,
        verify: Verify = "sample",
        events: bool = False,
    ) -> None:
        name = instance or f"{socket.gethostname()[:64]}-{os.getpid()}"
        self.checks = Checks(verify)
        self.last_error: Exception | None = None
        self.identity = Identity(name, scope, events)
        self.device = MappedDevice(self.identity)
        where = socket_path() if path is None else pathlib.Path(path)
        self.link = AsyncLink(where, self.identity, timeout_s)

    async def open(
        self,
        spec: CacheSpec,
        *,
        rank: int = -1,
        world: int = 1,
        slices: Sequence[Slice] = (),
        epoch: int = 0,
    ) -> AsyncCache:
        """See sync.Client.open."""
        cache = AsyncCache(self, spec, rank, world, tuple(slices), epoch)
        cache.device = self.device
        await self.attempt(cache.entering(), None)
        return cache

    async def map_device(self, uuid: bytes = b"") -> bool:
        """See sync.Client.map_device."""
        return await self.attempt(self.device.mapping(uuid), default=False)

    async def register(self, name: str, fd: int, offset: int, stride: int, rows: int) -> AsyncRegion:
        """See sync.Client.register."""
        region = AsyncRegion(self, name, registering(self.identity, name, offset, stride, rows), [fd])
        await self.attempt(region.entering(), None)
        return region

    async def register_kv(
        self, name: str, memory: Stretches, planes: Sequence[wire.Plane], tokens: Sequence[bytes]
    ) -> AsyncRegion:
        """See sync.Client.register_kv."""
        region = AsyncRegion(self, name, *registering_kv(self.identity, name, memory, planes, tokens))
        await self.attempt(region.entering(), None)
        return region

    async def order(self, paths: Sequence[AsyncPath], waited_ms: Sequence[int], bound_ms: int = 1000) -> list[int]:
        """Numbers of the paths (of one cache) in the order to serve them; as given where there is no daemon."""
        return await self.attempt(ordering(paths, waited_ms, bound_ms), list(range(len(paths))))

    async def ping(self) -> bool:
        """Whether the daemon's serving loop answers."""
        return await self.attempt(pinging(), default=False)

    async def stat(self) -> dict[str, object]:
        """Numbers of the daemon that any engine may see; empty while it is away."""
        return await self.attempt(asking_stat(), {})

    def events(self) -> list[wire.Message]:
        """Events that have come since the last call, for a client made with events=True."""
        return self.link.events()

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        return self.link.joined is not None

    async def attempt(self, steps: Steps[T], default: T, wait_s: float = 0.0) -> T:
        """What the steps give, or the default where the daemon is away or has no room."""
        try:
            return await self.link.run(steps, wait_s)
        except Away as exc:
            self.last_error = exc
        except KvtierError as exc:
            if exc.code in FAULTS:
                raise
            self.last_error = exc
        return default

    async def close(self) -> None:
        """Let go of everything and disconnect."""
        await self.link.leave()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()


class AsyncCache(OpenCache):
    """See sync.Cache."""

    def __init__(
        self, client: AsyncClient, spec: CacheSpec, rank: int, world: int, slices: tuple[Slice, ...], epoch: int
    ) -> None:
        super().__init__(spec, rank, world, slices, epoch)
        self.client = client

    async def match(self, keys: bytes, request: str = "", session: str = "") -> AsyncPath:
        """Longest cached prefix of a path of page keys; pins nothing. `request` and `session` are ids for people."""
        return await AsyncPath(self, request, session).extend(keys)

    async def adopt(self, share: bytes) -> AsyncLease | AsyncReservation:
        """What another process of this instance holds and shared: a lease to read, a reservation to fill."""
        self.client.link.look()
        got = await self.client.attempt(self.entering(), None)
        told = adopted(share, self, got[0] if got else None)
        if told.lease is not None:
            return AsyncBorrowed(self, got and Given(got[0], told.lease, told.cache_id))
        held = got and told.reservation and Given(got[0], told.reservation, told.cache_id)
        return AsyncReservation(self, told.start, held or None)

    async def reset(self) -> int:
        """Move to a new epoch and free the old one; see sync.Cache.reset."""
        await self.client.attempt(self._resetting(), 0)
        return self.epoch

    async def flush(self, timeout_s: float = 60.0) -> bool:
        """Whether everything committed before is durable."""
        return await self.client.attempt(self._flushing(timeout_s), default=False, wait_s=timeout_s)

    async def exists(self, group: int, keys: bytes) -> bytes:
        """One types.Presence byte for each opaque key."""
        return await self.client.attempt(self._existing(group, keys), bytes(self._count(keys)))

    async def acquire_keys(self, group: int, keys: bytes, wait_ms: int = 1000) -> AsyncLease:
        """Lease opaque keys, prefix root first; positions in this list are the pages of the lease."""
        got = await self.client.attempt(self._acquiring_keys(group, keys, wait_ms), None, wait_ms / 1000)
        return AsyncLease(self, got)

    async def reserve_keys(self, group: int, keys: bytes, wait_ms: int = 50) -> AsyncReservation:
        """Slots for new keys; positions in this list are the pages of the reservation."""
        got = await self.client.attempt(self._reserving_keys(group, keys, wait_ms), None, wait_ms / 1000)
        return AsyncReservation(self, 0, got)


class AsyncPath(KeyPath):
    """See sync.Path."""

    cache: AsyncCache

    async def extend(self, keys: bytes = b"") -> Self:
        """Append whole page keys (only these are sent) and match again."""
        await self.cache.client.attempt(self._matching(keys), None)
        return self

    async def acquire(self, pages: int = -1, wait_ms: int = 1000) -> AsyncLease:
        """Lease the first pages (-1: all that match), waiting so long for those that must be loaded."""
        got = await self.cache.client.attempt(self._acquiring(pages, wait_ms), None, wait_ms / 1000)
        return AsyncLease(self.cache, got)

    async def reserve(
        self,
        start: int,
        pages: int,
        wants: Sequence[tuple[int, Sequence[int]]] = (),
        wait_ms: int = 50,
        *,
        device: bool = False,
        running: bool = False,
    ) -> AsyncReservation:
        """Slots for pages [start, start + pages); see sync.Path.reserve."""
        steps = self._reserving(start, pages, wants, wait_ms, device, running)
        return AsyncReservation(self.cache, start, await self.cache.client.attempt(steps, None, wait_ms / 1000))

    async def put(self, first: int, data: Sequence[Bytes], wait_ms: int = 50) -> int:
        """Store pages from `first` on: how many of them are served now; see sync.Path.put.

        Copies are made in threads, and `data` is not read any more once this ends, cancelled too.
        """
        wait_s = wait_ms / 1000 + slow_s(self.cache, data)
        return await self.cache.client.attempt(putting(self, first, data, wait_ms), 0, wait_s)

    async def prefetch(self) -> None:
        """Bring the matched pages to host without leasing them."""
        await self.cache.client.attempt(self._prefetching(), None)

    async def hint(self, what: str, seconds: float = 0.0, page: int = 0) -> None:
        """Say what is known of the path's future: `continues`, `waiting` (for a tool, `seconds`), or `dead`.

        The first two keep it for `seconds` (0: a minute), after which it is like any other; with `dead` what there is
        from page number `page` on goes first. Raises bad_request.
        """
        await self.cache.client.attempt(self._hinting(what, seconds, page), None)

    async def push(self, to: str) -> None:
        """Give the peer `to` the pages that are here, and the rest as it is committed."""
        await self.cache.client.attempt(self._pushing(to), None)

    async def agree(self, others: Mapping[str, CacheSpec], wait_ms: int = 200) -> int:
        """Of a model spread over hosts: how many pages this host's daemon and all `others` can serve.

        `others`: peers' names and the specs of their parts (identity.part_of). 0 where one does not say in time.
        """
        return await self.cache.client.attempt(self._agreeing(others, wait_ms), 0, wait_ms / 1000)

    async def close(self) -> None:
        """Drop the daemon's handle; matching again makes a new one."""
        await self.cache.client.attempt(self._closing(), None)


async def fenced(slots: Slots, after: Reached | None, timeout_s: float) -> None:
    """Wait in a thread until a device is done with slots; raises io where it is not: they stay held, as cancelled."""
    if after is not None:
        slots.busy_until(after)
    if slots.busy:
        await asyncio.to_thread(slots.fence, None, timeout_s)


class AsyncLease(HeldLease):
    """Readable pages, held until released. An async context manager."""

    def __init__(self, cache: AsyncCache, got: Given[wire.Acquired] | None) -> None:
        super().__init__(cache, cache.client.checks, *(got or ()))
        self._client = cache.client

    async def release(self, after: Reached | None = None, timeout_s: float = FENCE_S) -> None:
        """Give the lease back; its views must not be used any more. `after`: see sync.Lease.release."""
        await fenced(self, after, timeout_s)
        await self._client.attempt(self._releasing(), None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.release()


class AsyncBorrowed(AsyncLease):
    """See sync.Borrowed."""

    async def release(self, after: Reached | None = None, timeout_s: float = FENCE_S) -> None:
        """Only this process's own reading ends."""
        await fenced(self, after, timeout_s)
        self._end()


class AsyncReservation(HeldReservation):
    """Writable slots. An async context manager that gives back what was not committed."""

    def __init__(self, cache: AsyncCache, start: int, got: Given[wire.Reserved] | None) -> None:
        super().__init__(cache, start, *(got or ()))
        self._client = cache.client

    async def commit(
        self,
        first: int | None = None,
        pages: int | None = None,
        after: Reached | None = None,
        timeout_s: float = FENCE_S,
    ) -> int:
        """Say that pages are written; how many of them all are served now. See sync.Reservation.commit."""
        await fenced(self, after, timeout_s)
        return await self._client.attempt(self._committing(first, pages), 0, self.summing_s(first, pages))

    async def abort(self, after: Reached | None = None, timeout_s: float = FENCE_S) -> None:
        """Give back what is not committed; its slots must not be touched any more. `after` as for `commit`."""
        await fenced(self, after, timeout_s)
        await self._client.attempt(self._aborting(), None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.abort()


class AsyncRegion(HeldRegion):
    """Memory of the engine's own; see sync.Client.register."""

    def __init__(
        self, client: AsyncClient, name: str, message: wire.Register | wire.RegisterKv, fds: Sequence[int]
    ) -> None:
        super().__init__(name, message, fds)
        self._client = client

    async def start_load(
        self, source: Source, rows: Numbers, *, group: int = 0, first: int = 0, wait_ms: int = 10000
    ) -> AsyncTransfer:
        """Begin copying items into rows; see sync.Region.start_load."""
        transfer = AsyncTransfer(self, rows, wait_ms)
        await self._client.attempt(self._loading(transfer, source, group, first, wait_ms), None)
        return transfer.in_hand()

    async def load(
        self, source: Source, rows: Numbers, *, group: int = 0, first: int = 0, wait_ms: int = 10000
    ) -> bytes:
        """Copy items into rows: one byte per row, 1 where its verified bytes are there; see sync.Region.load."""
        return await (await self.start_load(source, rows, group=group, first=first, wait_ms=wait_ms)).finish()

    async def start_store(
        self, target: Target, rows: Numbers, *, group: int = 0, first: int = 0, wait_ms: int = 10000
    ) -> AsyncTransfer:
        """Begin copying rows into the cache; see sync.Region.start_store."""
        transfer = AsyncTransfer(self, rows, wait_ms)
        await self._client.attempt(self._storing(transfer, target, group, first, wait_ms), None)
        return transfer.in_hand()

    async def store(
        self, target: Target, rows: Numbers, *, group: int = 0, first: int = 0, wait_ms: int = 10000
    ) -> bytes:
        """Copy rows into the cache: one byte per row, 1 where the item is stored or was already."""
        return await (await self.start_store(target, rows, group=group, first=first, wait_ms=wait_ms)).finish()

    async def unregister(self) -> bool:
        """Let the daemon forget the region; False where it cannot be told or transfers still run."""
        return await self._client.attempt(self._unregistering(), default=False)


class AsyncTransfer(Moving):
    """One load or store in flight; its rows are fenced until the daemon's word is there."""

    def __init__(self, region: AsyncRegion, rows: Numbers, wait_ms: int) -> None:
        super().__init__(region, rows)
        self._client = region._client  # noqa: SLF001 - of the same module
        self._wait_s = wait_ms / 1000

    async def wait(self, timeout_s: float) -> bytes | None:
        """One byte per row, or None while it is not done (`lost`: never will be)."""
        return await self._client.attempt(self._waiting(), None, timeout_s - self._client.link.timeout_s)

    async def cancel(self) -> bytes | None:
        """Stop; returns what was done once no byte moves any more, or None where the connection is lost first."""
        return await self._client.attempt(self._cancelling(), None)

    async def finish(self) -> bytes:
        """Wait as long as was asked for, then stop; what was done. Cancelled: the rows stay fenced until drained."""
        try:
            done = await self._client.attempt(self._waiting(), None, self._wait_s)
            if done is None:
                done = await self.cancel()
        except BaseException:
            await self._client.attempt(self._forsaking(), None)
            raise
        return done or bytes(len(self.rows))
