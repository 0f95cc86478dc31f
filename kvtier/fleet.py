"""Puts a daemon into a fleet, where its settings say so: peers to ask, the port they ask on, events for routers."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Literal

import msgspec

from kvtier.depots import Mooncake, Redis, address
from kvtier.events.feed import Feed
from kvtier.peer.depot import Depot
from kvtier.peer.direct import Direct
from kvtier.peer.secrets import read
from kvtier.peer.shelf import Shelf
from kvtier.peer.terms import MIN_RATE, Terms
from kvtier.peer.tls import Certs
from kvtier.server.home import Home
from kvtier.store import Store
from kvtier.types import Code, KvtierError, bad

MAX_NODES: Final = 1024
_ENDPOINT: Final = re.compile(r"tcp://(127\.0\.0\.1|\[::1\]):(?P<port>\d{1,5})|ipc://.+")
_log = logging.getLogger("kvtier.peer")


class Peers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Other hosts."""

    backend: Literal["direct", "redis", "mooncake"] = "direct"
    """How pages go from host to host: daemons talk to each other, or share a store."""
    nodes: str = ""
    """All hosts of the fleet, this one too, the same list everywhere: `a=10.0.0.1:9478,b=10.0.0.2:9478`; empty: no
    peers."""
    name: str = ""
    """Which of them this host is."""
    listen: str = ""
    """Where peers are served, as host:port; empty: this host's address in the list."""
    secrets: str = ""
    """File with the fleet's key and one secret per trust scope that is shared; readable by its owner only."""
    replicas: int = 2
    """Hosts that get each prompt's pages; copies that Mooncake is asked for."""
    deadline_ms: int = 200
    """How long a peer may take to answer; a transfer has that and the time of its bytes at 32 MiB/s."""
    rate: int = 0
    """Bytes of pages a second to one peer, and as many from it, at most, the same on every host; 0: no limit."""
    tls_cert: str = ""
    """This host's certificate, made out to its name in the list (DNS name); with tls_key and tls_ca, peers talk TLS."""
    tls_key: str = ""
    """The certificate's key."""
    tls_ca: str = ""
    """The CA that signs every host's certificate. All three are read again when they change."""
    grace_s: int = 60
    """A host that is down for longer is replaced as a home by the next one, which gets its pages from the others."""
    redis: Redis = Redis()
    mooncake: Mooncake = Mooncake()

    @property
    def wanted(self) -> bool:
        """Whether there is a fleet."""
        return bool(self.nodes) or self.backend != "direct"

    def check(self) -> None:
        """Raise bad_request naming the first setting that cannot be served."""
        if not self.wanted:
            return
        if self.backend == "direct":
            self._check_nodes()
        elif self.nodes or self.listen:
            raise bad("peers.nodes", f"nothing: with {self.backend} hosts share a store and do not know each other")
        elif self.backend == "redis":
            self.redis.check()
        else:
            self.mooncake.check()
        if not self.secrets:
            raise bad("peers.secrets", "a file: peers are served to nobody without a key")
        if not 1 <= self.replicas <= 16:
            raise bad("peers.replicas", "1..16", self.replicas)
        if not 1 <= self.deadline_ms <= 60_000:
            raise bad("peers.deadline_ms", "1..60000", self.deadline_ms)
        if self.rate and self.rate < MIN_RATE:
            raise bad("peers.rate", f"0 or at least {MIN_RATE}", self.rate)
        if len({bool(each) for each in (self.tls_cert, self.tls_key, self.tls_ca)}) > 1:
            raise bad("peers.tls_cert", "a certificate, its key and a CA, all three or none")
        if not 1 <= self.grace_s <= 86_400:
            raise bad("peers.grace_s", "1..86400", self.grace_s)

    def _check_nodes(self) -> None:
        """The same of what only daemons that talk to each other need."""
        nodes = nodes_of(self.nodes)
        if self.name not in nodes:
            raise bad("peers.name", f"one of {', '.join(nodes)}", self.name)
        if self.listen:
            address("peers.listen", self.listen)


class Events(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """KV events for routers, in vLLM's format over ZMQ (extra `events`)."""

    publish: str = ""
    """Where they are published, such as tcp://127.0.0.1:5557; this host only, for nothing guards it. Empty: nowhere."""
    replay: str = ""
    """Where missed ones can be asked for, such as tcp://127.0.0.1:5558."""
    model: str = ""
    """Announce only caches of this model; empty: all. Caches with a salt or an adapter are never announced."""

    def check(self) -> None:
        """Raise bad_request naming the first setting that cannot be served."""
        for field, text in (("events.publish", self.publish), ("events.replay", self.replay)):
            found = _ENDPOINT.fullmatch(text)
            if text and (found is None or not 0 < int(found["port"] or 1) < 1 << 16):  # ZMQ takes 99999 for 34463
                raise bad(field, "tcp://127.0.0.1:port or ipc://path", text)
        if self.replay and not self.publish:
            raise bad("events.publish", "an endpoint, where there is one for replays")


def announce(store: Store, config: Events) -> Callable[[], None] | None:
    """Announce what is cached from now on, before the store starts; what ends it. None where nothing is published.

    Raises KvtierError where pyzmq is missing or an endpoint cannot be had.
    """
    if not config.publish:
        return None
    try:
        import zmq  # noqa: PLC0415 - an extra

        from kvtier.events.publish import Publisher  # noqa: PLC0415
    except ImportError:
        raise bad("events.publish", "an environment with pyzmq (pip install 'kvtier[events]')") from None
    loop = asyncio.get_running_loop()

    def again() -> None:
        loop.call_soon_threadsafe(feed.announce)

    try:
        sender = Publisher(config.publish, config.replay, again)
    except zmq.ZMQError as exc:
        raise KvtierError(Code.IO, f"{config.publish}, {config.replay}: {exc}", "events") from None
    feed = Feed(sender.send, config.model)
    feed.announce()
    store.parts.feed = feed

    def end() -> None:
        feed.flush()
        sender.close()

    return end


def nodes_of(text: str) -> Mapping[str, tuple[str, int]]:
    """Addresses by name of a list `name=host:port,...`; raises bad_request."""
    found: dict[str, tuple[str, int]] = {}
    for part in text.split(","):
        name, equals, where = part.strip().partition("=")
        if not equals or not name or name in found:
            raise bad("peers.nodes", "name=host:port,... with each name once", part)
        found[name] = address("peers.nodes", where)
    if len(found) > MAX_NODES:
        raise bad("peers.nodes", f"at most {MAX_NODES} hosts", len(found))
    return found


def join(store: Store, config: Peers) -> Home | None:
    """Give the store its peers; the Home that is to be started with the server. None where no fleet is configured.

    Raises KvtierError for secrets that cannot be used, OSError for an address that cannot be had.
    """
    if not config.wanted:
        return None
    files = [Path(each) for each in (config.tls_cert, config.tls_key, config.tls_ca) if each]
    certs = Certs(*files) if files else None
    secrets, deadline_s = read(Path(config.secrets), fleet=certs is None), config.deadline_ms / 1000
    if config.backend != "direct":
        counts = store.parts.counts
        redis = config.backend == "redis"
        shelf: Shelf = (
            config.redis.shelf(deadline_s, counts)
            if redis
            else config.mooncake.shelf(config.replicas, deadline_s, counts)
        )
        name = config.name or "this host"
        store.join_fleet(Depot(shelf, secrets, name=name, deadline_s=deadline_s, book=store.parts.disk))
        _log.info("the fleet shares a store: %s", config.backend)
        return None
    nodes = nodes_of(config.nodes)
    terms = Terms(config.name, secrets, deadline_s, certs, config.rate)
    tier = Direct(nodes, terms, replicas=config.replicas, grace_s=config.grace_s, counts=store.parts.counts)
    where = address("peers.listen", config.listen) if config.listen else nodes[config.name]
    home = Home(store, terms, where, tier.fame, members=nodes)
    store.join_fleet(tier)
    _log.info("peer %s of %d, served on %s:%d", config.name, len(nodes), where[0], home.port)
    return home
