"""Real servers of shared stores for tests: a Redis, a Cluster of three, Mooncake's master and nodes."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Self

import pytest

import signalkit
from fleetkit import free_ports

REDIS = shutil.which("redis-server") or shutil.which("valkey-server")
MOONCAKE = Path(sys.executable).with_name("mooncake_master")
needs_redis = pytest.mark.skipif(REDIS is None, reason="no redis-server or valkey-server here")


def _loads(library: str) -> bool:
    """Whether the system has a shared library."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


needs_mooncake = pytest.mark.skipif(
    find_spec("mooncake") is None or not MOONCAKE.exists() or not _loads("libibverbs.so.1"),
    reason="no Mooncake here (extra mooncake, and libibverbs1)",
)
NODE = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 512 << 20, 16 << 20, "tcp", "", sys.argv[1]) == 0
print("up", flush=True)
for line in sys.stdin:  # whatever it is
    store.remove_all(force=True)
    print("cleared", flush=True)
"""


class Process:
    """A server that can be killed, started again and stopped; a context manager."""

    def __init__(self, command: Sequence[str], home: Path, name: str, port: int = 0) -> None:
        """It is up when it listens on the port, or (0) when it has printed a line."""
        self.command = list(command)
        self.log = home / f"{name}.log"
        self.port = port
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it is up."""
        with self.log.open("ab") as log:
            out = log if self.port else subprocess.PIPE
            self._process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=out, stderr=log)
        begin = time.monotonic()
        while not self._is_up():
            assert self._process.poll() is None, self.log.read_text()
            assert time.monotonic() - begin < 30, self.log.read_text()
            time.sleep(0.02)

    def _is_up(self) -> bool:
        if not self.port:
            return self._process.stdout.readline() == b"up\n"
        with socket.socket() as sock:
            return sock.connect_ex(("127.0.0.1", self.port)) == 0

    @property
    def running(self) -> bool:
        """Whether it was started and is there."""
        return self._process is not None and self._process.poll() is None

    def tell(self, line: bytes) -> None:
        """Say something to it and wait for a line."""
        self._process.stdin.write(line)
        self._process.stdin.flush()
        assert self._process.stdout.readline()

    def signal(self, number: int) -> None:
        """Stop it, or let it go on."""
        signalkit.send(self._process.pid, number)

    def kill(self) -> None:
        """Kill -9, and reap."""
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.signal(signal.SIGCONT)
        self.kill()


class Redis(Process):
    """A server without files of its own."""

    def __init__(self, home: Path, port: int = 0, *flags: str) -> None:
        port = port or free_ports(1)[0]
        self.address = ("127.0.0.1", port)
        where = home / f"redis{port}"
        where.mkdir()
        usual = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(where)]
        super().__init__([REDIS, *usual, *flags], home, f"redis{port}", port)

    def cli(self, *words: str | bytes, port: int | None = None) -> bytes:
        """One command; the reply as it came."""
        raw = [word if isinstance(word, bytes) else word.encode() for word in words]
        with socket.create_connection(("127.0.0.1", port or self.port), 10) as sock:
            sock.sendall(b"*%d\r\n" % len(raw) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in raw))
            return sock.recv(1 << 20)

    def names(self) -> list[bytes]:
        """All names that it has."""
        return [line for line in self.cli("KEYS", "*").split(b"\r\n") if line.startswith(b"kvt1:")]


class Proxy:
    """Between a client and a server of loopback; what the server says goes through `spoil`, while there is one."""

    def __init__(self, port: int) -> None:
        self.spoil: Callable[[bytes], bytes | None] | None = None
        """Returns what is sent instead; None ends the connection."""
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._ends: list[socket.socket] = [self._listener]
        self._threads = [threading.Thread(target=self._accept)]

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
                self._ends += [near, far]
                for source, sink, back in ((near, far, False), (far, near, True)):
                    self._threads.append(threading.Thread(target=self._carry, args=(source, sink, back)))
                    self._threads[-1].start()

    def _carry(self, source: socket.socket, sink: socket.socket, back: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                said = self.spoil(data) if back and self.spoil else data
                if said is None:
                    break
                sink.sendall(said)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for end in self._ends:
            end.close()


class Mooncake:
    """A master and nodes that contribute memory; the master is what is killed and stopped."""

    def __init__(self, home: Path, nodes: int = 1) -> None:
        port, metrics = free_ports(2)
        self.master = f"127.0.0.1:{port}"
        flags = [f"--rpc_port={port}", "--rpc_address=127.0.0.1", f"--metrics_port={metrics}",
                 "--metrics_host=127.0.0.1", "--logtostderr=true", "--client_ttl=3"]  # fmt: skip
        self._master = Process([str(MOONCAKE), *flags], home, "master", port)
        self.nodes = [Process([sys.executable, "-c", NODE, self.master], home, f"node{n}") for n in range(nodes)]

    def start(self) -> None:
        """Start the master, and the nodes that do not run."""
        self._master.start()
        for node in self.nodes:
            if not node.running:
                node.start()

    def kill(self) -> None:
        """Kill -9 of the master: it forgets everything."""
        self._master.kill()

    def clear(self) -> None:
        """Remove every value, unannounced."""
        self.nodes[0].tell(b"clear\n")

    def signal(self, number: int) -> None:
        """Stop the master, or let it go on."""
        self._master.signal(number)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in (self._master, *self.nodes):
            if process.running:
                process.__exit__()
