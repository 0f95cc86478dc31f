"""Settings of stores that the whole fleet shares, and the shelf that they describe."""

from __future__ import annotations

import importlib.util
import ipaddress
import ssl
import stat
from collections import Counter
from pathlib import Path

import msgspec

from kvtier.peer.mooncake import MooncakeShelf
from kvtier.peer.mooncake_child import Setup
from kvtier.peer.redis import RedisShelf
from kvtier.peer.redis_server import Login
from kvtier.types import Code, KvtierError, bad


class Redis(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A Redis or Valkey that the fleet shares (`peers.backend = "redis"`)."""

    servers: str = ""
    """host:port of the server, or of some servers of a Cluster: `10.0.0.7:6379,10.0.0.8:6379`."""
    credentials: str = ""
    """File with one line `password` or `user password`, readable by its owner only; needed off loopback."""
    ttl_s: int = 0
    """Seconds after which the server forgets a page; 0: when its own policy says so."""
    tls: bool = False
    """Talk TLS, and believe only servers that the authority below vouches for."""
    ca: str = ""
    """File with the authority's certificates; empty: those of the system."""
    certificate: str = ""
    """File with this host's certificate and key (PEM), where the servers want one."""

    def check(self) -> None:
        """Raise bad_request naming the first setting that cannot be served."""
        servers = addresses("peers.redis.servers", self.servers)
        if not self.credentials and not all(map(_local, servers)):
            raise bad("peers.redis.credentials", "a file: off loopback only servers that ask for a password are used")
        if not 0 <= self.ttl_s <= 1 << 31:
            raise bad("peers.redis.ttl_s", "0..2147483648", self.ttl_s)
        if (self.ca or self.certificate) and not self.tls:
            raise bad("peers.redis.tls", "true, where certificates are named")

    def shelf(self, deadline_s: float, counts: Counter[str]) -> RedisShelf:
        """The shelf; raises KvtierError for files that cannot be used."""
        user, password = read_credentials(Path(self.credentials)) if self.credentials else (b"", b"")
        login = Login(user, password, self._context())
        servers = addresses("peers.redis.servers", self.servers)
        return RedisShelf(servers, login, ttl_s=self.ttl_s, deadline_s=deadline_s, counts=counts)

    def _context(self) -> ssl.SSLContext | None:
        """How TLS is talked; None: not."""
        if not self.tls:
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca or None)
            if self.certificate:
                context.load_cert_chain(self.certificate)
        except OSError as exc:
            raise bad("peers.redis.ca, peers.redis.certificate", f"PEM files ({exc})") from None
        return context


class Mooncake(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A Mooncake Store that the fleet shares (`peers.backend = "mooncake"`, extra `mooncake`)."""

    master: str = ""
    """host:port of its master."""
    metadata: str = "P2PHANDSHAKE"
    """Where its engines find each other: this, or the URL of a metadata server."""
    protocol: str = "tcp"
    """How bytes go: tcp, rdma, or whatever else the engine was built with."""
    devices: str = ""
    """Which RDMA devices, such as mlx5_0,mlx5_1; empty: those that the engine finds."""
    exposed: bool = False
    """Let it be off loopback: nothing in Mooncake asks who reads or writes, and its engine listens on every address."""

    def check(self) -> None:
        """Raise bad_request naming the first setting that cannot be served."""
        if not _local(address("peers.mooncake.master", self.master)) and not self.exposed:
            raise bad("peers.mooncake.exposed", "true, off loopback: whoever reaches the cluster can read and write it")
        if not self.protocol or not self.metadata:
            raise bad("peers.mooncake.protocol, peers.mooncake.metadata", "a name")

    def shelf(self, replicas: int, deadline_s: float, counts: Counter[str]) -> MooncakeShelf:
        """The shelf; raises KvtierError where the engine is not installed."""
        if importlib.util.find_spec("mooncake") is None:
            raise bad("peers.backend", "an environment with Mooncake (pip install 'kvtier[mooncake]')")
        setup = Setup(self.master, self.metadata, self.protocol, self.devices, replicas)
        return MooncakeShelf(setup, deadline_s=deadline_s, counts=counts)


def addresses(field: str, text: str) -> list[tuple[str, int]]:
    """The addresses of a list `host:port,...`; raises bad_request."""
    return [address(field, part) for part in text.split(",")]


def address(field: str, text: str) -> tuple[str, int]:
    """One `host:port`; raises bad_request."""
    host, colon, port = text.strip().rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 1 << 16:
        raise bad(field, "host:port", text)
    return host.strip("[]"), int(port)


def _local(where: tuple[str, int]) -> bool:
    """Whether an address certainly is this host's own."""
    try:
        return ipaddress.ip_address(where[0]).is_loopback
    except ValueError:
        return where[0] == "localhost"


def read_credentials(path: Path) -> tuple[bytes, bytes]:
    """User (empty: the default one) and password of a file; raises KvtierError, which says nothing of what is in it."""
    try:
        mode = path.stat().st_mode
        words = path.read_bytes().split()
    except OSError as exc:
        raise bad("peers.redis.credentials", f"a readable file ({exc})") from None
    if stat.S_IMODE(mode) & 0o077:
        raise KvtierError(Code.FORBIDDEN, f"{path} can be read by others (chmod 600)", "peers.redis.credentials")
    if len(words) not in (1, 2):
        raise bad("peers.redis.credentials", "a file with a password, or a user and a password")
    return (words[0] if len(words) == 2 else b""), words[-1]
