"""Every peer tier that there is, in front of real servers, for the tests that all of them must pass."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import pytest
import xxhash

import signalkit
from engines import content, idle, spec
from fleetkit import FLEET, SECRET, free_ports, write_secrets
from kvtier.demo.daemon import Daemon
from kvtier.identity import CacheSpec
from kvtier.peer.base import PeerTier, Place, Shared
from kvtier.peer.depot import Depot
from kvtier.peer.direct import Direct
from kvtier.peer.fame import Fame
from kvtier.peer.items import items_of
from kvtier.peer.mooncake import MooncakeShelf
from kvtier.peer.mooncake_child import Setup
from kvtier.peer.redis import RedisShelf
from kvtier.peer.secrets import Secrets, read
from kvtier.peer.shelf import Shelf
from kvtier.peer.terms import Terms
from kvtier.server.home import Home
from kvtier.store import Store
from sharedkit import Mooncake, Redis, needs_mooncake, needs_redis
from storekit import storing, until

SPEC = spec()
HOST = 4 << 20
"""Bytes of the host tier of the other host."""
PATIENCE_S = 5.0
"""The deadline where nothing is to fail."""
SCOPE = f"uid:{os.getuid()}"


class Pair(NamedTuple):
    """A tier, and the store of another host whose pages it reaches."""

    tier: PeerTier
    far: Store
    shared: Shared
    secrets: Secrets
    home: str
    """What the tier calls where pages go."""
    lose: Callable[[], None]
    """Everything that was stored goes away, unannounced."""

    async def settled(self) -> None:
        """Nothing is on its way there any more."""
        await until(lambda: self.far.parts.peers is None or not self.far.parts.peers.busy)


@contextlib.asynccontextmanager
async def direct(
    home: Path, disk: Path | None = None, cache: CacheSpec = SPEC, host: int = HOST
) -> AsyncIterator[Pair]:
    """The tier `direct` with one peer, `far`, in this process."""
    async with storing(disk, host) as far, near(home, far) as (tier, secrets):

        def lose() -> None:
            for kept in list(far.parts.caches.values()):
                far.parts.retire(kept)

        yield Pair(tier, far, tier.shared(cache, "uid:0", 0), secrets, "far", lose)
        await until(lambda: idle(far) == [])


@contextlib.asynccontextmanager
async def near(home: Path, far: Store) -> AsyncIterator[tuple[Direct, Secrets]]:
    """The tier of another host that has `far` as its one peer."""
    secrets = read(write_secrets(home / "secrets", ["uid:0"]))
    ports = dict(zip(("near", "far"), free_ports(2), strict=True))
    nodes = {name: ("127.0.0.1", port) for name, port in ports.items()}
    served = Home(far, Terms("far", secrets, PATIENCE_S), nodes["far"], Fame())
    served.start()
    tier = Direct(nodes, Terms("near", secrets, PATIENCE_S))
    tier.start()
    try:
        await until(lambda: tier.status()[0]["up"])
        yield tier, secrets
    finally:
        await tier.close()
        await served.close()


@contextlib.asynccontextmanager
async def depots(
    home: Path, shelf: Callable[[Counter[str]], Shelf], lose: Callable[[], None], cache: CacheSpec, host: int
) -> AsyncIterator[Pair]:
    """Two hosts that share a store."""
    secrets = read(write_secrets(home / "secrets", ["uid:0"]))
    async with storing(None, host) as far:
        theirs = Depot(shelf(far.parts.counts), secrets, deadline_s=PATIENCE_S)
        far.join_fleet(theirs)
        far.parts.peers.start()
        tier = Depot(shelf(Counter()), secrets, deadline_s=PATIENCE_S)
        tier.start()
        try:
            await until(lambda: tier.answers() and theirs.answers())
            yield Pair(tier, far, tier.shared(cache, "uid:0", 0), secrets, tier.shelf.name, lose)
            await until(lambda: not far.parts.peers.busy)
            await until(lambda: idle(far) == [])
        finally:
            await tier.close()


@contextlib.asynccontextmanager
async def redis(home: Path, cache: CacheSpec = SPEC, host: int = HOST) -> AsyncIterator[Pair]:
    """The tier on a Redis."""
    with Redis(home) as server:

        def shelf(counts: Counter[str]) -> Shelf:
            return RedisShelf([server.address], deadline_s=PATIENCE_S, counts=counts)

        async with depots(home, shelf, lambda: server.cli("FLUSHALL"), cache, host) as pair:
            yield pair


@contextlib.asynccontextmanager
async def mooncake(home: Path, cache: CacheSpec = SPEC, host: int = HOST) -> AsyncIterator[Pair]:
    """The tier on a Mooncake Store of one node."""
    with Mooncake(home) as cluster:
        setup = setup_of(cluster)

        def shelf(counts: Counter[str]) -> Shelf:
            return MooncakeShelf(setup, deadline_s=PATIENCE_S, counts=counts)

        async with depots(home, shelf, cluster.clear, cache, host) as pair:
            yield pair


def setup_of(cluster: Mooncake) -> Setup:
    """How to join it."""
    return Setup(cluster.master, "P2PHANDSHAKE", "tcp", "", 1)


REDIS = pytest.param(redis, marks=needs_redis)
MOONCAKE = pytest.param(mooncake, marks=[needs_mooncake, pytest.mark.slow])
TIERS = pytest.mark.parametrize("tier", [direct, REDIS, MOONCAKE])
SHARED = pytest.mark.parametrize("tier", [REDIS, MOONCAKE])


# -- servers that fail ---------------------------------------------------------------------------------------------


class Server(Protocol):
    """Something that can be killed."""

    def start(self) -> None: ...
    def kill(self) -> None: ...
    def signal(self, number: int) -> None: ...


class Remote(NamedTuple):
    """A tier whose server is a process."""

    tier: PeerTier
    server: Server
    shared: Shared


class Peer:
    """A daemon that is the one peer of `direct`."""

    def __init__(self, home: Path) -> None:
        secrets = write_secrets(home / "secrets", [SCOPE])
        self.nodes = {name: ("127.0.0.1", port) for name, port in zip(("near", "far"), free_ports(2), strict=True)}
        text = ",".join(f"{name}={host}:{port}" for name, (host, port) in self.nodes.items())
        (home / "far").mkdir()
        flags = [f"--peers-nodes={text}", "--peers-name=far", f"--peers-secrets={secrets}"]
        self.daemon = Daemon(home / "far", host="16MiB", disk="0", flags=flags)

    def start(self) -> None:
        """Start it."""
        self.daemon.start()

    def kill(self) -> None:
        """Kill -9."""
        self.daemon.kill()

    def signal(self, number: int) -> None:
        """Stop it, or let it go on."""
        signalkit.send(self.daemon.pid, number)


@contextlib.asynccontextmanager
async def direct_remote(home: Path, deadline_s: float) -> AsyncIterator[Remote]:
    """The tier `direct` and a daemon."""
    peer = Peer(home)
    peer.start()
    secrets = read(home / "secrets")
    tier = Direct(peer.nodes, Terms("near", secrets, deadline_s))
    async with watched(tier, peer, secrets) as remote:
        yield remote


@contextlib.asynccontextmanager
async def redis_remote(home: Path, deadline_s: float) -> AsyncIterator[Remote]:
    """A Redis."""
    server = Redis(home)
    server.start()
    secrets = read(write_secrets(home / "secrets", [SCOPE]))
    tier = Depot(RedisShelf([server.address], deadline_s=deadline_s), secrets, deadline_s=deadline_s)
    async with watched(tier, server, secrets) as remote:
        yield remote


@contextlib.asynccontextmanager
async def watched(tier: PeerTier, server: Server, secrets: Secrets) -> AsyncIterator[Remote]:
    """A started tier, and the end of its server."""
    tier.start()
    try:
        await until(tier.answers)
        yield Remote(tier, server, secrets.shared(SPEC, SCOPE, 0))
    finally:
        with contextlib.suppress(ProcessLookupError):
            server.signal(signal.SIGCONT)
        await tier.close()
        server.kill()


@contextlib.asynccontextmanager
async def mooncake_remote(home: Path, deadline_s: float) -> AsyncIterator[Remote]:
    """Mooncake's master, and a node."""
    with Mooncake(home) as cluster:
        secrets = read(write_secrets(home / "secrets", [SCOPE]))
        tier = Depot(MooncakeShelf(setup_of(cluster), deadline_s=deadline_s), secrets, deadline_s=deadline_s)
        async with watched(tier, cluster, secrets) as remote:
            yield remote


REMOTES = pytest.mark.parametrize(
    "remote",
    [
        direct_remote,
        pytest.param(redis_remote, marks=needs_redis),
        pytest.param(mooncake_remote, marks=[needs_mooncake, pytest.mark.slow]),
    ],
)


# -- pages -----------------------------------------------------------------------------------------------------------


def page(keys: bytes, at: int, group: int = 0, cache: CacheSpec = SPEC) -> Place:
    """What belongs under page `at` of a path."""
    path = keys[at * cache.stride : (at + 1) * cache.stride] if cache.keyed else keys[: (at + 1) * cache.stride]
    return Place(group, at, [content(path, group, cache.groups[group].item_bytes)])


def blank(pages: range, group: int = 0, cache: CacheSpec = SPEC) -> list[Place]:
    """Places of this process's own memory."""
    size = cache.groups[group].item_bytes
    return [Place(group, at, [np.zeros(size, np.uint8)]) for at in pages]


def right(place: Place, keys: bytes, cache: CacheSpec = SPEC) -> bool:
    """Whether a place holds what belongs there."""
    return np.array_equal(np.concatenate(place.views), page(keys, place.page, place.group, cache).views[0])


def sums_of(places: list[Place]) -> list[int]:
    """Their checksums."""
    return [xxhash.xxh3_64_intdigest(place.views[0]) for place in places]


async def given(tier: PeerTier, shared: Shared, keys: bytes) -> int:
    """Offer a path to its homes and send what they want; pages that they took."""
    taken = 0
    for home, pages in tier.homes(shared, keys):
        sink = await tier.offer(home, shared, keys, ())
        assert sink is not None
        while sink.picks:
            places = [page(keys, at, group, shared.spec) for group, at in items_of(shared.spec, sink.picks, pages)]
            taken += await sink.send(places, sums_of(places))
            await sink.more()
        sink.close()
    return taken


async def given_soon(tier: PeerTier, shared: Shared, keys: bytes) -> None:
    """The same until it is taken: servers that came back find each other first."""
    end = asyncio.get_running_loop().time() + 20
    while True:
        try:
            await given(tier, shared, keys)
        except (OSError, AssertionError):
            assert asyncio.get_running_loop().time() < end, "it is never taken"
            await asyncio.sleep(0.05)
        else:
            return


async def fetched(tier: PeerTier, shared: Shared, keys: bytes) -> int:
    """Pages of a path that come, each checked to be right."""
    sources = await tier.find(shared, keys, 0)
    places = blank(range(sources[0].pages if sources else 0), 0, shared.spec)
    sums = await sources[0].fetch(places) if sources else []
    for source in sources:
        source.close()
    good = [place for place, value in zip(places, sums, strict=True) if value is not None]
    assert all(right(place, keys, shared.spec) for place in good), "wrong KV"
    return len(good)


__all__ = ["FLEET", "PATIENCE_S", "REMOTES", "SECRET", "SHARED", "SPEC", "TIERS", "Pair", "Remote"]
