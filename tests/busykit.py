"""Engines that do everything at once, at random, over one real store; every byte that they are given is compared."""

from __future__ import annotations

import asyncio
import inspect
import os
import random
from typing import Any

import numpy as np

from engines import FULL, STATE, WINDOW, Engine, content, spec, tokens
from kvtier import wire
from kvtier.identity import CacheSpec, GroupSpec, Slice
from kvtier.store import Store
from kvtier.types import Code, Kind, KvtierError
from storekit import memfd, rows

ROWS, STRIDE = 80, 32768
HYBRID = spec((FULL, WINDOW, STATE), model="hybrid")
KEYED = spec((FULL, GroupSpec(Kind.FULL, 1, 1, 9000)), model="keyed", key_bytes=16)
BIG = spec((GroupSpec(Kind.FULL, 1, 1, 30_000),), model="big")
PLAIN = spec(model="plain")
HALVES = tuple((Slice(0, 2, rank, rank + 1),) for rank in range(2))
FLEET: tuple[tuple[CacheSpec, Any], ...] = (
    (PLAIN, ()), (PLAIN, HALVES), (HYBRID, ()), (HYBRID, ()), (KEYED, ()), (KEYED, ()), (BIG, ()),
)  # fmt: skip
"""Spec and shards of each engine."""

MISSES = {Code.OVER_CAP, Code.NO_SPACE, Code.UNKNOWN, Code.BUSY}
"""What any request may be refused with; `io` is for those that promise something about disk."""


class Held:
    """A lease or reservation of `keys`; of a reservation, the pages that nobody committed yet."""

    def __init__(self, tag: bytes, keys: bytes, reply: Any) -> None:
        self.tag = tag
        self.keys = keys
        self.reply = reply
        self.first = reply.items[0].first if reply.items else 0
        self.open = set(range(reply.pages))


class Busy:
    """One engine of one or two processes. `live` keeps several requests of it in flight."""

    def __init__(self, store: Store, number: int, seed: int) -> None:
        self.store = store
        self.number = number
        self.rng = random.Random(seed * 1000 + number)
        self.spec, self.shards = FLEET[number]
        self.ranks: list[Engine] = []
        self.leases: list[Held] = []
        self.reservations: list[Held] = []
        self.calls: set[asyncio.Future[Any]] = set()
        self.fd, self.memory = memfd(ROWS, STRIDE, sealed=number % 2 == 0)
        self.region = self.born = self.row = 0

    # -- coming and going ------------------------------------------------------------------------------------------

    async def attach(self) -> None:
        """All processes join and open the cache."""
        ranks = []
        for shard in self.shards or ((),):
            self.born += 1
            engine = Engine(self.store, f"engine{self.number}", pid=self.number * 1000 + self.born)
            engine.tag = (await engine.open(self.spec, shard)).cache_id
            ranks.append(engine)
        register = wire.Register(f"engine{self.number}", "rows", 0, STRIDE, ROWS)
        self.region = self.store.register(register, self.fd, ranks[0].process.peer).region
        self.ranks = ranks

    async def hang_up(self) -> list[Engine]:
        """What is in flight is cancelled and drained, as the server does when a connection ends."""
        ranks, self.ranks = self.ranks, []
        while self.calls:
            for call in self.calls:
                call.cancel()
            await asyncio.wait(self.calls)
        return ranks

    async def bye(self) -> None:
        """It lets go of everything at once."""
        for engine in await self.hang_up():
            engine.leave()
        self.leases.clear()
        self.reservations.clear()

    async def die(self) -> None:
        """Its connections break; until its processes end it may read what it leased and write where it reserved."""
        ranks = await self.hang_up()
        for engine in ranks:
            self.store.leave(engine.process, clean=False)
        await asyncio.sleep(self.rng.random() * 0.02)
        for held in self.leases:
            check(ranks[0], held)
        for held in self.reservations:
            scribble(ranks[0], held)
        for engine in ranks:
            self.store.gone(engine.process)
            await asyncio.sleep(0)
        self.leases.clear()
        self.reservations.clear()

    async def call(self, message: wire.Message, rank: int = 0, *, impatient: float = 0.1) -> Any:
        """One request; None where it was refused, cancelled or cut off."""
        if not self.ranks:
            return None
        try:
            reply = self.store.verbs[type(message)](self.ranks[rank].process, message)
            if not inspect.isawaitable(reply):
                return reply
            task = asyncio.ensure_future(reply)
            self.calls.add(task)
            task.add_done_callback(self.calls.discard)
            if self.rng.random() < impatient:
                wait = self.rng.choice((-1, 0, 0.001, 0.01))
                task.cancel() if wait < 0 else asyncio.get_running_loop().call_later(wait, task.cancel)
            return await task
        except KvtierError as exc:
            durable = isinstance(message, wire.Flush | wire.Reset)
            assert exc.code in MISSES or (durable and exc.code is Code.IO), exc
            return None
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            return None

    # -- what engines do -------------------------------------------------------------------------------------------

    async def live(self, steps: int) -> None:
        """Some requests at a time, with an end of the whole engine now and then."""
        await self.attach()
        for _ in range(steps):
            some = [self.rng.choice(self.habits()) for _ in range(self.rng.randint(1, 4))]
            working = [asyncio.ensure_future(habit()) for habit in some]
            if self.rng.random() < 0.1:
                await asyncio.sleep(self.rng.random() * 0.01)
                await self.rng.choice((self.bye, self.die))()
            await asyncio.gather(*working)
            if not self.ranks:
                self.leases.clear()
                self.reservations.clear()
                await self.attach()
        await self.rng.choice((self.bye, self.die))()
        os.close(self.fd)

    def habits(self) -> list[Any]:
        """What this kind of engine does, the frequent more than once."""
        common = [self.release, self.release, self.commit, self.commit, self.abort]
        common += [self.commit_late, self.flush] if self.rng.random() < 0.2 else []
        common += [self.reset] if self.rng.random() < 0.05 else []
        if self.spec.keyed:
            return [*common, self.exists, self.acquire_keys, self.reserve_keys, self.load_keys, self.store_keys]
        more = [] if self.shards else [self.load, self.store_rows]
        return [*common, *more, self.acquire, self.acquire, self.reserve, self.reserve, self.prefetch]

    def path(self) -> bytes:
        """Some prompt: short and of few tokens, so that engines meet."""
        return tokens(*(self.rng.randrange(3) for _ in range(self.rng.randint(1, 14))))

    def some_keys(self) -> bytes:
        """Some opaque keys, none twice."""
        return b"".join(bytes([n]) * 16 for n in self.rng.sample(range(30), self.rng.randint(1, 10)))

    async def match(self, keys: bytes) -> Any:
        """A handle, matched in two steps."""
        cut = self.rng.randrange(len(keys) // self.spec.stride + 1) * self.spec.stride
        first = await self.call(wire.Match(self.ranks[0].opened.cache, keys=keys[:cut])) if self.ranks else None
        return first and await self.call(wire.Match(0, first.handle, keys[cut:]))

    async def acquire(self) -> None:
        """Lease a prompt and keep it for a while."""
        keys, engine, tag = self.path(), self.ranks[0], self.ranks[0].tag
        found = await self.match(keys)
        if found is None:
            return
        got = await self.call(wire.Acquire(found.handle, self.rng.choice((-1, 3)), self.rng.choice((0, 20, 2000))))
        if got and got.lease:
            self.keep(engine, tag, keys, got, self.leases)

    def keep(self, engine: Engine, tag: bytes, keys: bytes, reply: Any, where: list[Held]) -> None:
        """Note what was given in the epoch of `tag`; it is for an engine that may be gone by now."""
        if engine in self.ranks:
            where.append(Held(tag, keys, reply))
            if where is self.leases:
                check(engine, where[-1])

    async def prefetch(self) -> None:
        """Bring a prompt to host."""
        found = await self.match(self.path())
        if found:
            await self.call(wire.Prefetch(found.handle))

    async def release(self) -> None:
        """Compare a lease once more, then let it go."""
        if self.leases:
            held = self.leases.pop(self.rng.randrange(len(self.leases)))
            check(self.ranks[0], held)
            await self.call(wire.Release(held.reply.lease))

    async def reserve(self) -> None:
        """Slots for a prompt from some page on."""
        keys, engine, tag = self.path(), self.ranks[0], self.ranks[0].tag
        found = await self.match(keys)
        if found is None:
            return
        pages = len(keys) // self.spec.stride
        start = self.rng.choice((0, found.pages, found.pages + found.pending)) if found.pages < pages else 0
        start = min(start, pages - 1)
        wants = (wire.Want(2, (pages - 1).to_bytes(4, "little")),) if self.spec is HYBRID else ()
        got = await self.call(wire.Reserve(found.handle, start, pages - start, wants, self.rng.choice((0, 50))))
        if got and got.reservation:
            self.keep(engine, tag, keys, got, self.reservations)

    async def commit(self) -> None:
        """Every process writes its part of some pages of a reservation, and says so."""
        if not self.reservations:
            return
        held = self.rng.choice(self.reservations)
        if not held.open:
            self.reservations.remove(held)
            return
        first = self.rng.choice(sorted(held.open))
        count = 1
        while first + count in held.open and self.rng.random() < 0.9:
            count += 1
        held.open -= set(range(first, first + count))
        for rank, engine in enumerate(self.ranks):
            write(engine, held, first, count)
            await self.call(wire.Commit(held.reply.reservation, held.first + first, count), rank)
            if engine not in self.ranks:
                return

    async def commit_late(self) -> None:
        """Only one of the processes gets as far as writing."""
        if len(self.ranks) == 2 and self.reservations:
            held = self.rng.choice(self.reservations)
            if held.open:
                at = held.open.pop()
                write(self.ranks[1], held, at, 1)
                await self.call(wire.Commit(held.reply.reservation, held.first + at, 1), 1)

    async def abort(self) -> None:
        """Give a reservation up, sometimes after nonsense was written into it."""
        if self.reservations:
            held = self.reservations.pop(self.rng.randrange(len(self.reservations)))
            scribble(self.ranks[0], held)
            for rank in range(len(self.ranks)):
                await self.call(wire.Abort(held.reply.reservation), rank)

    async def flush(self) -> None:
        """Wait a little for what is not durable."""
        await self.call(wire.Flush(wait_ms=30))

    async def reset(self) -> None:
        """New weights; the other engines find out when they ask next."""
        for rank, engine in enumerate(list(self.ranks)):
            opened = await self.call(wire.Reset(engine.opened.cache), rank, impatient=0)
            if opened:
                engine.opened, engine.tag = opened, opened.cache_id

    # -- keys and regions --------------------------------------------------------------------------------------------

    async def exists(self) -> None:
        """Ask."""
        keys = self.some_keys()
        await self.call(wire.Exists(self.ranks[0].opened.cache, self.rng.randrange(2), keys))

    async def acquire_keys(self) -> None:
        """Lease some keys."""
        engine, tag, keys = self.ranks[0], self.ranks[0].tag, self.some_keys()
        got = await self.call(wire.AcquireKeys(engine.opened.cache, self.rng.randrange(2), keys, 200))
        if got and got.lease:
            self.keep(engine, tag, keys, got, self.leases)

    async def reserve_keys(self) -> None:
        """Slots for some keys."""
        engine, tag, keys = self.ranks[0], self.ranks[0].tag, self.some_keys()
        got = await self.call(wire.ReserveKeys(engine.opened.cache, self.rng.randrange(2), keys))
        if got and got.reservation:
            self.keep(engine, tag, keys, got, self.reservations)

    def rows(self, count: int) -> list[int]:
        """Row numbers that no transfer of the last ones uses: a process never gives out a row twice in a step."""
        at, self.row = self.row, (self.row + count) % (ROWS - 14)
        return list(range(at, at + count))

    async def store_keys(self) -> None:
        """Rows to keys."""
        engine, keys, group = self.ranks[0], self.some_keys(), self.rng.randrange(2)
        await self._rows_out(engine, keys, group, {"cache": engine.opened.cache, "keys": keys}, len(keys) // 16)

    async def load_keys(self) -> None:
        """Keys to rows, which are compared."""
        engine, keys, group = self.ranks[0], self.some_keys(), self.rng.randrange(2)
        await self._rows_in(engine, engine.tag, keys, group, {"cache": engine.opened.cache, "keys": keys})

    async def load(self) -> None:
        """A lease to rows."""
        if self.leases:
            held = self.rng.choice(self.leases)
            group = held.reply.items[self.rng.randrange(len(held.reply.items))]
            where = {"lease": held.reply.lease, "first": group.first}
            await self._rows_in(self.ranks[0], held.tag, held.keys, group.group, where, group.first, group.count)

    async def store_rows(self) -> None:
        """Rows to a reservation, then the commit."""
        whole = [h for h in self.reservations if len(h.open) == h.reply.pages]
        if not whole:
            return
        held, engine = self.rng.choice(whole), self.ranks[0]
        self.reservations.remove(held)
        first, pages, group = held.first, held.reply.pages, 0
        for items in held.reply.items:
            group = items.group
            where = {"reservation": held.reply.reservation, "first": first}
            await self._rows_out(engine, held.keys, group, where, pages, first, tag=held.tag, items=items)
        if engine in self.ranks:
            await self.call(wire.Commit(held.reply.reservation, first, pages))

    async def _rows_out(
        self, engine: Engine, keys: bytes, group: int, where: Any, count: int, first: int = 0, **more: Any
    ) -> None:
        size = engine.opened.groups[group].item_bytes
        at = self.rows(count)
        for n, row in enumerate(at):
            self.memory[row, :size] = content(
                more.get("tag", engine.tag) + part(self.spec, keys, first + n), group, size
            )
        if items := more.get("items"):
            there = np.frombuffer(items.offsets, "<i8").reshape(count, -1)[:, 0] >= 0
            at = [row if there[n] else -1 for n, row in enumerate(at)]
        done = await self.call(wire.Store(self.region, group, rows(*at), **where), impatient=0)
        assert done is None or len(done.done) == count

    async def _rows_in(
        self, engine: Engine, tag: bytes, keys: bytes, group: int, where: Any, first: int = 0, count: int = 0
    ) -> None:
        count = count or len(keys) // self.spec.stride
        size = engine.opened.groups[group].item_bytes
        at = self.rows(count)
        loaded = await self.call(wire.Load(self.region, group, rows(*at), wait_ms=200, **where))
        for n, done in enumerate(loaded.done if loaded else b""):
            want = content(tag + part(self.spec, keys, first + n), group, size)
            assert not done or np.array_equal(self.memory[at[n], :size], want), "wrong KV in a row"


def part(of: CacheSpec, keys: bytes, n: int) -> bytes:
    """What names page n of a path, or the n-th key."""
    return keys[n * of.stride : (n + 1) * of.stride] if of.keyed else keys[: (n + 1) * of.stride]


def check(engine: Engine, held: Held) -> None:
    """Compare every byte of a lease."""
    before, engine.tag = engine.tag, held.tag
    try:
        for items in held.reply.items:
            engine.verify(held.keys, items)
    finally:
        engine.tag = before


def write(engine: Engine, held: Held, first: int, count: int) -> None:
    """Write an engine's own cells of positions [first, first + count)."""
    before, engine.tag = engine.tag, held.tag
    for items in held.reply.items:
        size = 8 * engine.opened.groups[items.group].slots_per_item
        some = wire.Items(items.group, items.first + first, count, items.offsets[first * size : (first + count) * size])
        keys = held.keys[first * engine.spec.stride :] if engine.spec.keyed else held.keys
        engine.write_items(keys, some)
    engine.tag = before


def scribble(engine: Engine, held: Held) -> None:
    """A copy engine that was never told to stop writes over all that is reserved and not committed."""
    for items in held.reply.items:
        info = engine.opened.groups[items.group]
        for at, row in enumerate(np.frombuffer(items.offsets, "<i8").reshape(items.count, info.slots_per_item)):
            if row[0] >= 0 and at in held.open:
                for piece in engine.pieces(items.group, row):
                    piece[:] = 0xEE
