"""What tests of the fleet share: daemons that are each other's peers, and engines that know right KV from wrong."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

import signalkit
from engineproc import CELL, HEADS, LAYERS, SPEC, content, path_keys
from kvtier import wire
from kvtier.client import Client
from kvtier.control.call import Admin
from kvtier.demo.daemon import Daemon

DEADLINE_MS = 500
FLEET = "11" * 32
SECRET = "22" * 32


def free_ports(n: int) -> list[int]:
    """Ports of loopback that nobody has."""
    socks = [socket.socket() for _ in range(n)]
    try:
        for sock in socks:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in socks]
    finally:
        for sock in socks:
            sock.close()


def write_secrets(path: Path, scopes: Sequence[str], fleet: str = FLEET, secret: str = SECRET) -> Path:
    """A file of secrets as the daemon wants it."""
    path.touch(mode=0o600)
    path.write_text(f"# for tests\nfleet {fleet}\n" + "".join(f"{scope} {secret}\n" for scope in scopes))
    return path


def until(holds: Callable[[], bool], timeout_s: float = 20.0) -> float:
    """Wait until it holds; the seconds that took."""
    begin = time.monotonic()
    while not holds():
        assert time.monotonic() - begin < timeout_s, "still waiting"
        time.sleep(0.02)
    return time.monotonic() - begin


class Host:
    """One daemon of a fleet, and an engine on it."""

    def __init__(self, name: str, daemon: Daemon) -> None:
        self.name = name
        self.daemon = daemon
        self.client: Client | None = None
        self.place: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        """Where its process is started."""

    def start(self) -> None:
        """Start the daemon."""
        with self.place():
            self.daemon.start()

    def ask(self, message: wire.Message) -> dict:
        """What an operator is told."""
        with Admin(self.daemon.socket.with_name("admin.sock"), 10.0) as admin:
            return admin.ask(message, wire.Info).data

    def ctl(self, *words: str, stdin: str = "") -> dict:
        """What kvtierctl prints as JSON."""
        admin = str(self.daemon.socket.with_name("admin.sock"))
        command = [sys.executable, "-m", "kvtier.ctl", "--socket", admin, *words, "--json"]
        return json.loads(subprocess.run(command, input=stdin, capture_output=True, text=True, check=True).stdout)

    def count(self, name: str) -> int:
        """One counter of the daemon."""
        return self.ask(wire.Metrics())["counters"].get(name, 0)

    def up(self) -> set[str]:
        """Peers that answer it."""
        return {row["name"] for row in self.ask(wire.Status())["peers"] if row["up"]}

    def seen(self, pages: list[int]) -> dict[str, int]:
        """Pages of a path that each host which answers has, itself too."""
        keys = np.repeat(np.array(pages, np.int32), SPEC.page_tokens).tobytes()
        rows = self.ask(wire.Route(wire.Prompt(tokens=keys)))["hosts"]
        return {row["name"]: row["device"] + row["host"] + row["disk"] for row in rows}

    def settled(self) -> bool:
        """Whether nothing waits to be pushed."""
        return self.ask(wire.Metrics())["queues"]["pushes"] == 0

    def sound(self) -> None:
        """No invariant is broken, and nothing of the arena is in use but cached pages."""
        assert (broken := self.ask(wire.Check())["broken"]) == [], broken

    def emptied(self) -> None:
        """Once its caches are emptied no slot is in use: none was leaked."""
        self.sound()
        self.ask(wire.Purge(scope=f"uid:{os.getuid()}"))
        until(lambda: not self.ask(wire.Status())["slots"])

    def secrets(self, path: Path) -> None:
        """Let the daemon read another file of secrets; before it starts."""
        self.daemon.flags = [f for f in self.daemon.flags if "secrets" not in f] + [f"--peers-secrets={path}"]

    def signal(self, number: int) -> None:
        """Stop it, let it go on, or worse."""
        signalkit.send(self.daemon.pid, number)

    def engine(self) -> Client:
        """The engine, attached when first needed."""
        if self.client is None:
            self.client = Client(self.daemon.socket, instance=f"engine-{self.name}", timeout_s=10.0, verify="always")
        return self.client

    def put(self, pages: list[int]) -> int:
        """Compute and store a path; pages that are served."""
        keys, stride = path_keys(pages), SPEC.stride
        path = self.engine().open(SPEC).match(keys)
        with path.reserve(0, len(pages), wait_ms=2000) as reserved:
            for page in range(reserved.pages):
                reserved.write(0, page, content(keys[: (page + 1) * stride]).reshape(-1))
            return reserved.commit()

    def get(self, pages: list[int], wait_ms: int = 5000) -> int:
        """Lease a path, with what peers have; every byte is checked; pages that were served."""
        keys, stride = path_keys(pages), SPEC.stride
        path = self.engine().open(SPEC).match(keys)
        with path.acquire(wait_ms=wait_ms) as lease:
            out = np.empty(LAYERS * HEADS * CELL, np.uint8)
            for page in range(lease.pages):
                assert lease.read(0, page, out), "a leased page is not what was stored"
                assert np.array_equal(out.reshape(LAYERS, HEADS, CELL), content(keys[: (page + 1) * stride])), (
                    "wrong KV"
                )
            return lease.pages

    def close(self) -> None:
        """Detach the engine, end the daemon."""
        if self.daemon.running:
            self.signal(signal.SIGCONT)
        if self.client is not None:
            self.client.close()
            self.client = None
        if self.daemon.running:
            self.daemon.kill()


class Fleet:
    """Daemons a, b, c, ... on loopback; a context manager."""

    def __init__(
        self,
        home: Path,
        n: int = 3,
        *,
        replicas: int = 2,
        more: Sequence[tuple[str, int]] = (),
        address: Callable[[int], tuple[str, int]] | None = None,
        more_flags: Sequence[str] = (),
        **sizes: str,
    ) -> None:
        """`more`: (name, port) of members that are no daemons of this class; `address`: of the n-th, else loopback."""
        names = [chr(ord("a") + i) for i in range(n)]
        ports = free_ports(n)
        where = [("127.0.0.1", port) if address is None else address(i) for i, port in enumerate(ports)]
        members = [*zip(names, where, strict=True), *((name, ("127.0.0.1", port)) for name, port in more)]
        nodes = ",".join(f"{name}={host}:{port}" for name, (host, port) in members)
        secrets = write_secrets(home / "secrets", [f"uid:{os.getuid()}"])
        size = {"host": "64MiB", "disk": "0"} | sizes
        self.isolated: set[str] = set()
        """Members that nobody gets to talk to."""
        self.hosts = {}
        for name in names:
            (home / name).mkdir()
            flags = [
                f"--peers-nodes={nodes}", f"--peers-name={name}", f"--peers-secrets={secrets}",
                f"--peers-replicas={replicas}", f"--peers-deadline-ms={DEADLINE_MS}", *more_flags,
            ]  # fmt: skip
            self.hosts[name] = Host(name, Daemon(home / name, flags=flags, **size))

    def __enter__(self) -> dict[str, Host]:
        for host in self.hosts.values():
            host.start()
        for host in self.hosts.values():
            if host.name not in self.isolated:
                others = self.hosts.keys() - {host.name} - self.isolated
                until(lambda host=host, others=others: host.up() >= others)
        return self.hosts

    def __exit__(self, *_: object) -> None:
        for host in self.hosts.values():
            host.close()
            for log in host.daemon.home.rglob("*.log"):
                assert not any(secret in log.read_text() for secret in (FLEET, SECRET)), f"{log} tells a secret"
