"""Caches and paths of keys as a client knows them; their verbs as steps without I/O.

The sync and the async client inherit these and add one line of I/O per verb.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

from kvtier import wire
from kvtier.client.device import MappedDevice
from kvtier.client.link import FAULTS, Away, Call, Given, Join, Joined, Post, R, Steps
from kvtier.client.whole import whole
from kvtier.identity import CacheSpec, Slice
from kvtier.types import Code, KvtierError, bad


class OpenCache:
    """One cache as one process of an engine sees it; opened again on each new connection."""

    def __init__(self, spec: CacheSpec, rank: int, world: int, slices: tuple[Slice, ...], epoch: int) -> None:
        spec.check()
        if slices and len(slices) != len(spec.groups):
            raise bad("slices", f"one for each of {len(spec.groups)} groups", len(slices))
        self.spec = spec
        self.epoch = epoch
        """The newest epoch known here; KV of older ones is never matched."""
        self.cache_id = b""
        """32 bytes; empty until the daemon was reached."""
        self.groups: tuple[wire.GroupInfo, ...] = ()
        self.prefill = 0.0
        """Tokens a second that this engine computes; where it is set, matches say what is worth loading."""
        self.writes_above = -1
        """This process writes its shard of others' reservations with higher numbers; -1: of none."""
        self._open = (rank, world, slices)
        self._joined: Joined | None = None
        self.device: MappedDevice | None = None
        """What the client reads of the daemon's device memory."""
        self._number = 0
        self._owed = False
        """A reset was asked for before the daemon could say which epoch it is in."""

    @property
    def slices(self) -> tuple[Slice, ...]:
        """The part of each group's items that this process holds; empty: whole items."""
        return self._open[2]

    def slice_of(self, group: int) -> Slice | None:
        """The part of each item that this process writes; None: whole items."""
        return self._open[2][group] if self._open[2] else None

    def entering(self) -> Steps[tuple[Joined, int]]:
        """Be connected, with this cache open there: the connection and the cache's number on it."""
        joined = cast("Joined", (yield Join()))
        while self._joined is not joined:  # again where another thread has reset the cache meanwhile
            rank, world, slices = self._open
            request = wire.Open(self.spec, rank, world, slices, self.epoch)
            try:
                opened = cast("wire.Opened", (yield Call(joined, request, wire.Opened)))
            except KvtierError as exc:
                if self.cache_id and exc.code in FAULTS:  # it was open before: not the engine's fault
                    raise Away(f"the daemon does not open this cache again: {exc}") from exc
                raise
            if self._owed:
                opened = cast("wire.Opened", (yield Call(joined, wire.Reset(opened.cache), wire.Opened)))
            if self.device is not None and joined.device < 0:
                yield from self.device.entering(joined)
            self._opened(joined, opened)
        return joined, self._number

    def _opened(self, joined: Joined, opened: wire.Opened) -> None:
        """Remember what the daemon said, unless it is of an epoch that another thread has left since."""
        if opened.epoch < self.epoch:
            return
        self._number, self.cache_id, self.groups = opened.cache, opened.cache_id, opened.groups
        self.writes_above = opened.writes_above
        self.epoch = opened.epoch
        self._joined, self._owed = joined, False

    def _resetting(self) -> Steps[int]:
        """A new epoch, here first: whatever happens to the request, the old KV is not matched again."""
        joined, number = self._joined, self._number
        self.epoch += 1
        self._joined, self._owed = None, not self.cache_id
        if joined is None or not joined.alive:
            yield from self.entering()
            return self.epoch
        self._opened(joined, cast("wire.Opened", (yield Call(joined, wire.Reset(number), wire.Opened))))
        return self.epoch

    def _flushing(self, timeout_s: float) -> Steps[bool]:
        """Whether all that was committed before is durable."""
        joined, number = yield from self.entering()
        yield Call(joined, wire.Flush(number, int(timeout_s * 1000)), wire.Ok)
        return True

    def _existing(self, group: int, keys: bytes) -> Steps[bytes]:
        """Presence of opaque keys, as many a request as the daemon takes."""
        joined, number = yield from self.entering()
        step, states = wire.MAX_ASKED * self.spec.key_bytes, []
        for at in range(0, max(1, len(keys)), step):
            reply = yield Call(joined, wire.Exists(number, group, keys[at : at + step]), wire.Existence)
            states.append(cast("wire.Existence", reply).states)
        return b"".join(states)

    def _acquiring_keys(self, group: int, keys: bytes, wait_ms: int) -> Steps[Given[wire.Acquired]]:
        """Lease opaque keys."""
        joined, number = yield from self.entering()
        asked = self.cache_id
        reply = yield Call(joined, wire.AcquireKeys(number, group, keys, wait_ms), wire.Acquired)
        return Given(joined, cast("wire.Acquired", reply), asked)

    def _reserving_keys(self, group: int, keys: bytes, wait_ms: int) -> Steps[Given[wire.Reserved]]:
        """Slots for opaque keys."""
        joined, number = yield from self.entering()
        asked = self.cache_id
        reply = yield Call(joined, wire.ReserveKeys(number, group, keys, wait_ms), wire.Reserved)
        return Given(joined, cast("wire.Reserved", reply), asked)

    def _count(self, keys: bytes) -> int:
        """How many opaque keys there are; raises bad_request where they are not whole keys of a keyed cache."""
        if not self.spec.keyed or len(keys) % self.spec.key_bytes:
            raise bad("keys", "whole keys of a keyed cache", len(keys))
        return len(keys) // self.spec.key_bytes


def _own(keys: bytes) -> bytes:
    """Keys that nobody changes later, whatever buffer they come in: the path keeps them. Raises bad_request."""
    try:
        return keys if isinstance(keys, bytes) else bytes(memoryview(keys))
    except TypeError:
        raise bad("keys", "bytes, as page_keys makes them", type(keys).__name__) from None


class KeyPath:
    """A path of page keys and the daemon's handle for it. Keeps the keys, to match again after a reconnect."""

    def __init__(self, cache: OpenCache, request: str, session: str) -> None:
        self.cache = cache
        self.pages = 0
        """Pages that can be acquired, as of the last match."""
        self.pending = 0
        """Pages after them that somebody is about to commit."""
        self.asking = False
        """Whether other hosts are being asked for more: `acquire()` of all waits for them."""
        self.known = 0
        """In a cache with state groups: pages that are served along the path, whether or not a state point is there."""
        self.segments: tuple[wire.Segment, ...] = ()
        self.load_s: tuple[float, ...] = ()
        """Seconds to load each segment, where the cache's `prefill` is set."""
        self.recompute_s: tuple[float, ...] = ()
        """Seconds to compute each segment."""
        self.cut = -1
        """Pages that are loaded sooner than computed; -1: not known."""
        self.refused = ""
        """Why the last `put` found room for fewer pages than it was given: a types.Code."""
        self._request = request, session
        self._keys: list[bytes] = []
        self._told = 0
        """So many of them the daemon's handle is of: others may extend the path while an answer is on its way."""
        self._joined: Joined | None = None
        self._epoch = cache.epoch
        self._handle = 0

    @property
    def keys(self) -> bytes:
        """All page keys of the path."""
        return b"".join(self._keys)

    def _matching(self, keys: bytes) -> Steps[None]:
        """Append keys and match; only new keys are sent where the daemon has the handle."""
        stride, keys = self.cache.spec.stride, _own(keys)
        if self.cache.spec.keyed or len(keys) % stride:
            raise bad("keys", f"whole page keys of {stride} bytes of a token cache", len(keys))
        known = len(self._keys)
        if keys:
            self._keys.append(keys)
        handle, self.pages, self.pending, self.segments, self.asking = self._handle, 0, 0, (), False
        self.known = 0
        self.load_s, self.recompute_s, self.cut = (), (), -1
        self._handle = 0
        rate = self.cache.prefill
        joined, number = yield from self.cache.entering()
        reply, told = None, known + bool(keys)
        if handle and self._joined is joined and self._epoch == self.cache.epoch and self._told == known:
            try:
                reply = yield Call(joined, wire.Match(0, handle, keys, *self._request, rate), wire.Matched)
            except KvtierError as exc:
                if exc.code is not Code.UNKNOWN:
                    raise
        if reply is None:
            parts = tuple(self._keys)
            told = len(parts)
            reply = yield Call(joined, wire.Match(number, 0, b"".join(parts), *self._request, rate), wire.Matched)
        self._matched(joined, cast("wire.Matched", reply), told)

    def _matched(self, joined: Joined, reply: wire.Matched, told: int) -> None:
        """Remember what the daemon said."""
        self._joined, self._epoch, self._handle, self._told = joined, self.cache.epoch, reply.handle, told
        self.pages, self.pending, self.segments = reply.pages, reply.pending, reply.segments
        self.load_s, self.recompute_s, self.cut = reply.load_s, reply.recompute_s, reply.cut
        self.asking, self.known = reply.asking, reply.known

    def _handled(self) -> Steps[tuple[Joined, int]]:
        """The connection and the handle on it, matching again where either is gone."""
        joined, _ = yield from self.cache.entering()
        here = self._joined is joined and self._epoch == self.cache.epoch and self._told == len(self._keys)
        if not (self._handle and here):
            yield from self._matching(b"")
            assert self._joined is not None
            joined = self._joined
        return joined, self._handle

    def _asking(self, message: Callable[[int], wire.Message], reply: type[R]) -> Steps[Given[R]]:
        """Ask about the handle, matching again where the daemon does not know it any more."""
        joined, handle = yield from self._handled()
        asked = self.cache.cache_id
        try:
            return Given(joined, (yield Call(joined, message(handle), reply)), asked)
        except KvtierError as exc:
            if exc.code is not Code.UNKNOWN:
                raise
        self._handle = 0
        joined, handle = yield from self._handled()
        asked = self.cache.cache_id
        return Given(joined, (yield Call(joined, message(handle), reply)), asked)

    def _acquiring(self, pages: int, wait_ms: int) -> Steps[Given[wire.Acquired]]:
        """Lease pages of the path."""
        return (
            yield from self._asking(lambda handle: wire.Acquire(handle, pages, wait_ms, self._maps()), wire.Acquired)
        )

    def _maps(self) -> bool:
        """Whether this process maps the device's memory on the connection of the handle."""
        return self._joined is not None and self._joined.device >= 0

    def _reserving(
        self,
        start: int,
        pages: int,
        wants: Sequence[tuple[int, Sequence[int]]],
        wait_ms: int,
        device: bool,
        running: bool = False,
    ) -> Steps[Given[wire.Reserved]]:
        """Slots for pages of the path; in device memory only where that is mapped."""
        lists = tuple(
            wire.Want(group, whole(numbers, "wants", "page numbers", "<i4").tobytes()) for group, numbers in wants
        )
        return (
            yield from self._asking(
                lambda handle: wire.Reserve(handle, start, pages, lists, wait_ms, device and self._maps(), running),
                wire.Reserved,
            )
        )

    def next_room(self, start: int, pages: int, wait_ms: int) -> wire.Reserve:
        """The request for slots of full groups that goes out before another was answered, on the handle as it is."""
        return wire.Reserve(self._handle, start, pages, (), wait_ms)

    def _prefetching(self) -> Steps[None]:
        """Bring matched pages to host."""
        yield from self._asking(wire.Prefetch, wire.Ok)

    def _hinting(self, what: str, seconds: float, page: int) -> Steps[None]:
        """Say what the engine knows of the path's future."""
        yield from self._asking(lambda handle: wire.Hint(handle, what, seconds, page), wire.Ok)

    def _pushing(self, to: str) -> Steps[None]:
        """Give a peer the pages of the path."""
        yield from self._asking(lambda handle: wire.Push(handle, to), wire.Ok)

    def _agreeing(self, others: Mapping[str, CacheSpec], wait_ms: int) -> Steps[int]:
        """Ask how much of the path all hosts of the model have."""
        parts = tuple(wire.Elsewhere(host, spec) for host, spec in others.items())
        given = yield from self._asking(lambda handle: wire.Agree(handle, parts, wait_ms), wire.Agreed)
        return given.reply.pages

    def _closing(self) -> Steps[None]:
        """Drop the handle."""
        handle, self._handle = self._handle, 0
        if handle and self._joined is not None and self._joined.alive:
            yield Post(self._joined, wire.Forget(handle))


def ordering(paths: Sequence[KeyPath], waited_ms: Sequence[int], bound_ms: int) -> Steps[list[int]]:
    """Positions of the paths in the order to serve them."""
    joined: Joined | None = None
    handles: list[int] = []
    for path in paths:
        joined, handle = yield from path._handled()  # noqa: SLF001 - one idea in two places
        handles.append(handle)
    if joined is None:
        return []
    reply = yield Call(joined, wire.Order(tuple(handles), tuple(waited_ms), bound_ms), wire.Ordered)
    at: dict[int, list[int]] = {}
    for n in sorted(range(len(handles)), key=lambda n: (waited_ms[n], -n)):  # a path may be there twice
        at.setdefault(handles[n], []).append(n)
    return [at[handle].pop() for handle in cast("wire.Ordered", reply).handles]


def pinging() -> Steps[bool]:
    """Whether the serving loop answers."""
    joined = yield Join()
    yield Call(joined, wire.Ping(), wire.Ok)
    return True


def asking_stat() -> Steps[dict[str, object]]:
    """Numbers of the daemon that any engine may see."""
    joined = yield Join()
    return cast("wire.Info", (yield Call(joined, wire.Stat(), wire.Info))).data
