"""The blocking client that an engine's process links: a daemon that is away is a miss, never an exception."""

from __future__ import annotations

import os
import pathlib
import socket
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self, TypeVar, cast

from kvtier import wire
from kvtier.client.caches import KeyPath, OpenCache, asking_stat, ordering, pinging
from kvtier.client.device import FENCE_S, MappedDevice, Reached
from kvtier.client.held import HeldLease, HeldReservation
from kvtier.client.layout import Bytes
from kvtier.client.link import FAULTS, Away, Given, Identity, Join, Start, Steps, Ticket, Wait
from kvtier.client.moving import Stretches, registering, registering_kv
from kvtier.client.putting import putting, slow_s
from kvtier.client.share import adopted
from kvtier.client.slots import Checks, Verify
from kvtier.client.synclink import SyncLink
from kvtier.client.syncmoving import Region, Transfer
from kvtier.identity import CacheSpec, Slice
from kvtier.paths import socket_path
from kvtier.types import KvtierError

__all__ = ["Borrowed", "Cache", "Client", "Lease", "Path", "Region", "Reservation", "Transfer"]

T = TypeVar("T")
R = TypeVar("R", bound=wire.Message)


class Client:
    """One process of an engine instance. Thread-safe. Connects when first used and again after a loss.

    Verbs of caches, paths, leases and regions return empty results while the daemon is away, hangs, or refuses for
    want of room; `last_error` says why. They raise KvtierError only where the program is at fault.
    """

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
        self.link = SyncLink(where, self.identity, timeout_s)

    def open(
        self,
        spec: CacheSpec,
        *,
        rank: int = -1,
        world: int = 1,
        slices: Sequence[Slice] = (),
        epoch: int = 0,
    ) -> Cache:
        """The cache that `spec` names; `slices` gives the part of each group's items that this rank holds.

        Raises KvtierError where the spec is refused. A daemon that is away is joined later.
        """
        cache = Cache(self, spec, rank, world, tuple(slices), epoch)
        cache.device = self.device
        self.attempt(cache.entering(), None)
        return cache

    def map_device(self, uuid: bytes = b"") -> bool:
        """Read device memory in place from now on, on later connections too; whether this one does.

        `uuid`: of the GPU whose kernels are to reach it (`device.facts.uuid`), which must be the memory's own.
        Where not, `device.reason` says why, and everything is read from host.
        """
        return self.attempt(self.device.mapping(uuid), default=False)

    def register(self, name: str, fd: int, offset: int, stride: int, rows: int) -> Region:
        """Memory of the engine's own: `rows` rows of `stride` bytes at `offset` of `fd`, for loads and stores."""
        region = Region(self, name, registering(self.identity, name, offset, stride, rows), [fd])
        self.attempt(region.entering(), None)
        return region

    def register_kv(
        self, name: str, memory: Stretches, planes: Sequence[wire.Plane], tokens: Sequence[bytes]
    ) -> Region:
        """The engine's own paged KV in device memory, for loads and stores that name its blocks as rows.

        `tokens`: what each stretch of `memory` begins with at each attach, which the daemon reads back: best what
        nobody else has. A page is `page_tokens / tokens` rows in a row.
        """
        region = Region(self, name, *registering_kv(self.identity, name, memory, planes, tokens))
        self.attempt(region.entering(), None)
        return region

    def order(self, paths: Sequence[Path], waited_ms: Sequence[int], bound_ms: int = 1000) -> list[int]:
        """Numbers of the paths (of one cache) in the order to serve them; as given where there is no daemon."""
        return self.attempt(ordering(paths, waited_ms, bound_ms), list(range(len(paths))))

    def ping(self) -> bool:
        """Whether the daemon's serving loop answers."""
        return self.attempt(pinging(), default=False)

    def stat(self) -> dict[str, object]:
        """Numbers of the daemon that any engine may see; empty while it is away."""
        return self.attempt(asking_stat(), {})

    def events(self) -> list[wire.Message]:
        """Events that have come since the last call, for a client made with events=True."""
        return self.link.events()

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        return self.link.joined is not None

    # -- pipelining --------------------------------------------------------------------------------------------

    def submit(self, message: wire.Message, reply: type[R]) -> Ticket[R]:
        """Send a request without waiting; raises Away where there is no daemon."""

        def sending() -> Steps[Ticket[R]]:
            return cast("Ticket[R]", (yield Start((yield Join()), message, reply)))

        return self.link.run(sending())

    def wait(self, ticket: Ticket[R], timeout_s: float | None = None) -> R:
        """The reply of a request that was submitted; raises KvtierError, and Away when none comes in time."""

        def waiting() -> Steps[R]:
            return cast("R", (yield Wait(ticket, patient=False)))

        return self.link.run(waiting(), 0.0 if timeout_s is None else timeout_s - self.link.timeout_s)

    # -- running steps -----------------------------------------------------------------------------------------

    def attempt(self, steps: Steps[T], default: T, wait_s: float = 0.0) -> T:
        """What the steps give, or the default where the daemon is away or has no room."""
        try:
            return self.link.run(steps, wait_s)
        except Away as exc:
            self.last_error = exc
        except KvtierError as exc:
            if exc.code in FAULTS:
                raise
            self.last_error = exc
        return default

    def close(self) -> None:
        """Let go of everything and disconnect."""
        self.link.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class Cache(OpenCache):
    """One KV format in one trust scope; see Client.open."""

    def __init__(
        self, client: Client, spec: CacheSpec, rank: int, world: int, slices: tuple[Slice, ...], epoch: int
    ) -> None:
        super().__init__(spec, rank, world, slices, epoch)
        self.client = client

    def match(self, keys: bytes, request: str = "", session: str = "") -> Path:
        """Longest cached prefix of a path of page keys; pins nothing.

        `request` and `session` are the engine's own ids of the request and of its conversation, for people.
        """
        path = Path(self, request, session)
        return path.extend(keys)

    def adopt(self, share: bytes) -> Lease | Reservation:
        """What another process of this instance holds and shared: a lease to read, a reservation to fill."""
        self.client.link.look()
        got = self.client.attempt(self.entering(), None)
        told = adopted(share, self, got[0] if got else None)
        if told.lease is not None:
            return Borrowed(self, got and Given(got[0], told.lease, told.cache_id))
        held = got and told.reservation and Given(got[0], told.reservation, told.cache_id)
        return Reservation(self, told.start, held or None)

    def reset(self) -> int:
        """Move to a new epoch and free the old one; the old KV is not matched again even if the daemon is away."""
        self.client.attempt(self._resetting(), 0)
        return self.epoch

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Whether everything committed before is durable."""
        return self.client.attempt(self._flushing(timeout_s), default=False, wait_s=timeout_s)

    def exists(self, group: int, keys: bytes) -> bytes:
        """One types.Presence byte for each opaque key."""
        return self.client.attempt(self._existing(group, keys), bytes(self._count(keys)))

    def acquire_keys(self, group: int, keys: bytes, wait_ms: int = 1000) -> Lease:
        """Lease opaque keys, prefix root first; positions in this list are the pages of the lease."""
        return Lease(self, self.client.attempt(self._acquiring_keys(group, keys, wait_ms), None, wait_ms / 1000))

    def reserve_keys(self, group: int, keys: bytes, wait_ms: int = 50) -> Reservation:
        """Slots for new keys; positions in this list are the pages of the reservation."""
        got = self.client.attempt(self._reserving_keys(group, keys, wait_ms), None, wait_ms / 1000)
        return Reservation(self, 0, got)


class Path(KeyPath):
    """A path of page keys; see Cache.match."""

    cache: Cache

    def extend(self, keys: bytes = b"") -> Self:
        """Append whole page keys (only these are sent) and match again."""
        self.cache.client.attempt(self._matching(keys), None)
        return self

    def acquire(self, pages: int = -1, wait_ms: int = 1000) -> Lease:
        """Lease the first pages (-1: all that match), waiting so long for those that must be loaded."""
        return Lease(self.cache, self.cache.client.attempt(self._acquiring(pages, wait_ms), None, wait_ms / 1000))

    def reserve(
        self,
        start: int,
        pages: int,
        wants: Sequence[tuple[int, Sequence[int]]] = (),
        wait_ms: int = 50,
        *,
        device: bool = False,
        running: bool = False,
    ) -> Reservation:
        """Slots for pages [start, start + pages); `wants` lists (group, pages) of window and state groups.

        `device`: in the device's memory, where `map_device` mapped it.

        `running`: for an engine that computes in the slots and goes on reading there. Pages may go beyond the path:
        `name` says what they hold once that is known. All slots stay held, those of served pages too, until `abort`.
        """
        steps = self._reserving(start, pages, wants, wait_ms, device, running)
        return Reservation(self.cache, start, self.cache.client.attempt(steps, None, wait_ms / 1000))

    def put(self, first: int, data: Sequence[Bytes], wait_ms: int = 50) -> int:
        """Store pages from `first` on: how many of them, from the first, are served now.

        `data` has rows [pages, bytes] for each group, as `write_pages` takes them; a page that is cached is left as it
        is. Faster than to reserve, write and commit one after another. Raises bad_request unless all groups are full.
        `refused` of the path says why there was room for fewer.
        """
        wait_s = wait_ms / 1000 + slow_s(self.cache, data)
        return self.cache.client.attempt(putting(self, first, data, wait_ms), 0, wait_s)

    def prefetch(self) -> None:
        """Bring the matched pages to host without leasing them."""
        self.cache.client.attempt(self._prefetching(), None)

    def hint(self, what: str, seconds: float = 0.0, page: int = 0) -> None:
        """Say what is known of the path's future: `continues`, `waiting` (for a tool, `seconds`), or `dead`.

        The first two keep it for `seconds` (0: a minute), after which it is like any other; with `dead` what there is
        from page number `page` on goes first. Raises bad_request.
        """
        self.cache.client.attempt(self._hinting(what, seconds, page), None)

    def push(self, to: str) -> None:
        """Give the peer `to` the pages that are here, and the rest as it is committed."""
        self.cache.client.attempt(self._pushing(to), None)

    def agree(self, others: Mapping[str, CacheSpec], wait_ms: int = 200) -> int:
        """Of a model spread over hosts: how many pages this host's daemon and all `others` can serve.

        `others`: peers' names and the specs of their parts (identity.part_of). 0 where one does not say in time.
        """
        return self.cache.client.attempt(self._agreeing(others, wait_ms), 0, wait_ms / 1000)

    def close(self) -> None:
        """Drop the daemon's handle; matching again makes a new one."""
        self.cache.client.attempt(self._closing(), None)


class Lease(HeldLease):
    """Readable pages, held until released. A context manager."""

    def __init__(self, cache: Cache, got: Given[wire.Acquired] | None) -> None:
        super().__init__(cache, cache.client.checks, *(got or ()))
        self._client = cache.client

    def release(self, after: Reached | None = None, timeout_s: float = FENCE_S) -> None:
        """Give the lease back; its views must not be used any more.

        `after`: an event of a stream that reads the slots, which is waited for first. Raises io where it is not
        reached: the lease stays then, since the device may still read.
        """
        self.fence(after, timeout_s)
        self._client.attempt(self._releasing(), None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


class Borrowed(Lease):
    """A lease that another process of the instance holds: read here, released there."""

    def release(self, after: Reached | None = None, timeout_s: float = FENCE_S) -> None:
        """Only this process's own reading ends."""
        self.fence(after, timeout_s)
        self._end()


class Reservation(HeldReservation):
    """Writable slots. A context manager that gives back what was not committed."""

    def __init__(self, cache: Cache, start: int, got: Given[wire.Reserved] | None) -> None:
        super().__init__(cache, start, *(got or ()))
        self._client = cache.client

    def commit(
        self,
        first: int | None = None,
        pages: int | None = None,
        after: Reached | None = None,
        timeout_s: float = FENCE_S,
    ) -> int:
        """Say that pages (default: from `first` to the end, or to the last that is named) are written.

        How many of them all are served now.

        `after`: an event of a stream that writes them, which is waited for first. Raises io where it is not reached.
        """
        self.fence(after, timeout_s)
        return self._client.attempt(self._committing(first, pages), 0, self.summing_s(first, pages))

    def abort(self, after: Reached | None = None, timeout_s: float = FENCE_S) -> None:
        """Give back what is not committed; its slots must not be touched any more. `after` as for `commit`.

        Of a running reservation all: what is committed is read through a lease from then on.
        """
        self.fence(after, timeout_s)
        self._client.attempt(self._aborting(), None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.abort()
